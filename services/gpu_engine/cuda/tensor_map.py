"""Tensor maps: what the copy engine must know of an array in device memory to fetch boxes of it (kernels/tma.cuh).

Reference: the driver API's cuTensorMapEncodeTiled. It is called through ctypes because the map must lie at a multiple
of 64 bytes, which cuda.bindings does not promise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from cuda.bindings import driver as cu

from services.gpu_engine.cuda.driver import check
from services.gpu_engine.cuda.geometry import BF16_BYTES

ALIGNMENT = 64


class CTensorMap(ctypes.Structure):
    """``blink::TensorMap``."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(address: int, *, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> CTensorMap:
    """The map of a bf16 array whose boxes are swizzled by 128 bytes in shared memory.

    Args:
        shape: elements of each dimension, the contiguous one first.
        strides: bytes between neighbours in each further dimension; multiples of 16.
        box: elements of each dimension that one copy fetches. What lies outside the array reads as zero.

    Raises:
        DriverError: the driver refuses the map.
    """
    rank = len(shape)
    room = (ctypes.c_uint64 * (16 + ALIGNMENT // 8))()
    encoded = CTensorMap.from_buffer(room, -ctypes.addressof(room) % ALIGNMENT)
    code = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.byref(encoded),
        int(cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        int(cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
        int(cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
        int(cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    check(f"cuTensorMapEncodeTiled of {tuple(shape)} by {tuple(box)}", (cu.CUresult(code),))
    return encoded


@cache
def cached_map(address: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> CTensorMap:
    """``tensor_map``, encoded once."""
    return tensor_map(address, shape=shape, strides=strides, box=box)


def cached_gated_map(address: int, outputs: int, columns: int, box: tuple[int, int]) -> CTensorMap:
    """Of gate over up, [2 outputs, columns] of bf16, whose rows alternate by eight in boxes of (columns, rows)."""
    row, (box_columns, box_rows) = BF16_BYTES * columns, box
    shape, strides = (columns, 8, 2, outputs // 8), (row, outputs * row, 8 * row)
    return cached_map(address, shape, strides, (box_columns, 8, 2, box_rows // 16))
