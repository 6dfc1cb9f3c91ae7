"""Weights as bfloat16 bit patterns, from every type that checkpoints store."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
    data = tensor.data[start:stop]
    if tensor.type is TensorType.BF16:
        return data.view(np.uint16)
    return to_bfloat16(_dequantize(data, tensor.type))


def _dequantize(data: NDArray[np.uint8], kind: TensorType) -> NDArray[np.float32]:
    rows = data.shape[0]
    if kind is TensorType.F32:
        return data.view(np.float32)
    if kind is TensorType.F16:
        return data.view(np.float16).astype(np.float32)
    blocks = data.reshape(rows, -1, kind.block_bytes)
    scale = blocks[:, :, :2].copy().view(np.float16).astype(np.float32)
    if kind is TensorType.Q8_0:
        return (scale * blocks[:, :, 2:].view(np.int8)).reshape(rows, -1)
    packed = blocks[:, :, kind.block_bytes - 16 :]
    quants = np.concatenate([packed & 0xF, packed >> 4], axis=2).astype(np.float32)
    if kind is TensorType.Q4_0:
        return (scale * (quants - 8)).reshape(rows, -1)
    minimum = blocks[:, :, 2:4].copy().view(np.float16).astype(np.float32)
    return (scale * quants + minimum).reshape(rows, -1)
