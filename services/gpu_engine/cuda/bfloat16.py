"""Weights as bfloat16 bit patterns, from every type that checkpoints store."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.models.dequantize import dequantize
from services.gpu_engine.models.tensors import StoredTensor, TensorType

Bits = NDArray[np.uint16]


def to_bfloat16(values: NDArray[np.float32]) -> Bits:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bfloat16(bits: Bits) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rows_as_bfloat16(tensor: StoredTensor, start: int, stop: int) -> Bits:
    """Rows start to stop of the tensor, [stop - start, columns]. BF16 is passed on without a copy."""
    if tensor.type is TensorType.BF16:
        return tensor.data[start:stop].view(np.uint16)
    return to_bfloat16(dequantize(tensor, start, stop))
