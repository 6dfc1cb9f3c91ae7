"""What stored tensors are worth, in float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.models import float8
from services.gpu_engine.models.tensors import StoredTensor, TensorType

PLAIN_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16)
Floats = NDArray[np.float32]


def dequantize(tensor: StoredTensor, start: int, stop: int) -> Floats:
    """Rows start to stop of the tensor, float32 [stop - start, columns]."""
    data, kind = tensor.data[start:stop], tensor.type
    if kind in PLAIN_TYPES:
        return plain_values(data, kind)
    if kind is TensorType.F8_E4M3:
        assert tensor.scale
        return float8.dequantize(data, tensor.scale, start)
    return _dequantize_ggml(data, kind)


def plain_values(data: NDArray[np.uint8], kind: TensorType) -> Floats:
    """Stored F32, F16 or BF16 numbers as float32, exactly; [rows, columns] of [rows, row_bytes].

    Raises:
        ValueError: another type.
    """
    match kind:
        case TensorType.F32:
            return data.view(np.float32)
        case TensorType.F16:
            return data.view(np.float16).astype(np.float32)
        case TensorType.BF16:
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    raise ValueError(f"{kind.name} is not a plain number")


def _dequantize_ggml(data: NDArray[np.uint8], kind: TensorType) -> Floats:
    rows = data.shape[0]
    blocks = data.reshape(rows, -1, kind.block_bytes)
    scale = blocks[:, :, :2].copy().view(np.float16).astype(np.float32)
    if kind is TensorType.Q8_0:
        return (scale * blocks[:, :, 2:].view(np.int8)).reshape(rows, -1)
    packed = blocks[:, :, kind.block_bytes - 16 :]
    quants = np.concatenate([packed & 0xF, packed >> 4], axis=2).astype(np.float32)
    if kind is TensorType.Q4_0:
        return (scale * (quants - 8)).reshape(rows, -1)
    minimum = blocks[:, :, 2:4].copy().view(np.float16).astype(np.float32)
    worth: Floats = (scale * quants + minimum).reshape(rows, -1)
    return worth
