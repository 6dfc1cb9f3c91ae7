"""A weight matrix in FP8 on the device."""

from __future__ import annotations

from dataclasses import dataclass

SCALE_COLUMNS = 128  # that share a row's scale, where scales are of blocks: kScaleColumns


@dataclass(frozen=True)
class Fp8Matrix:
    """Addresses of codes and scales.

    Attributes:
        codes: uint8 [rows, columns]; columns is a multiple of 16.
        scales: float32 [blocks, rows], of blocks of 128 columns, or [1, rows].
        blocks: how many.
    """

    codes: int
    scales: int
    blocks: int
