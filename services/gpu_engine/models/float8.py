"""The 8-bit float e4m3 (arXiv 2209.05433): sign, four bits of exponent with bias 7, three of mantissa; no infinity.

Subnormals are multiples of 2^-9, the largest number is 448, and NaN is all ones beside either sign.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.models.scale import Scale

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]

LARGEST = np.float32(448)
NAN_CODE = 0x7F
_MANTISSA_BITS, _SMALLEST_NORMAL, _SUBNORMALS_PER_ONE = 3, np.float32(2.0**-6), np.float32(2.0**9)


def _values() -> Floats:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    values = np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)
    values[[NAN_CODE, NAN_CODE | 0x80]] = np.nan
    return values


VALUES: Floats = _values()
"""What each code is worth, float32 [256]."""


def to_e4m3(values: Floats) -> Codes:
    """Codes of the nearest numbers, ties to even; beyond 448 saturates, NaN stays NaN. As PTX's cvt.rn.satfinite."""
    magnitude = np.abs(values)
    bits = magnitude.view(np.uint32)
    dropped = 23 - _MANTISSA_BITS
    rounded = (bits + ((1 << (dropped - 1)) - 1) + (bits >> dropped & 1)) >> dropped
    normal = rounded - ((127 - 7) << _MANTISSA_BITS)  # wraps around for subnormals, where it is not taken
    subnormal = np.rint(np.fmin(magnitude, _SMALLEST_NORMAL) * _SUBNORMALS_PER_ONE).astype(np.uint32)
    code = np.where(magnitude < _SMALLEST_NORMAL, subnormal, normal)
    code = np.where(magnitude >= LARGEST, NAN_CODE - 1, code)
    code = np.where(np.isnan(values), NAN_CODE, code)
    signed: Codes = (code | np.signbit(values).astype(np.uint32) << 7).astype(np.uint8)
    return signed


def quantize_rows(values: Floats) -> tuple[Codes, Scale]:
    """Each row by a scale of its own, with which the row's largest magnitude is 448.

    Args:
        values: [rows, columns].
    """
    columns = values.shape[1]
    scale: Floats = np.abs(values).max(axis=1, keepdims=True) / LARGEST
    scale[scale == 0] = 1
    return to_e4m3(values / scale), Scale(scale, 1, columns)


def dequantize(codes: Codes, scale: Scale, first_row: int = 0) -> Floats:
    """codes [rows, columns], the tensor's from ``first_row`` on, times their scales: one rounding in float32."""
    rows, columns = codes.shape
    return VALUES[codes] * scale.of_rows(first_row, first_row + rows, columns)
