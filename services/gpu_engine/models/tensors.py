"""A weight as it is stored: never converted here, only described."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.models.scale import Scale


class TensorType(enum.Enum):
    """How values are stored: (elements in a block, bytes of a block).

    Q4_0, Q4_1 and Q8_0 are GGML's: a float16 scale d (and minimum m), then quants q. Values are d * (q - 8),
    d * q + m and d * q. The low nibbles of a 4-bit block hold its first half. F8_E4M3 is float8.py's, with a scale
    beside it.
    """

    F32 = (1, 4)
    F16 = (1, 2, "half")
    BF16 = (1, 2, "brain")
    F8_E4M3 = (1, 1)
    Q4_0 = (32, 18)
    Q4_1 = (32, 20)
    Q8_0 = (32, 34)

    @property
    def block_elements(self) -> int:
        return int(self.value[0])

    @property
    def block_bytes(self) -> int:
        return int(self.value[1])

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row; ``columns`` must be a whole number of blocks."""
        if columns % self.block_elements:
            raise ValueError(f"{self.name} rows must be a multiple of {self.block_elements} long, not {columns}")
        return columns // self.block_elements * self.block_bytes


@dataclass(frozen=True)
class StoredTensor:
    """Bytes of one tensor.

    Attributes:
        shape: (rows, columns), or (columns,) for a vector.
        data: uint8 [rows, row_bytes], read-only, usually a view of a mapped file.
        scale: of F8_E4M3, always; of no other type.
    """

    shape: tuple[int, ...]
    type: TensorType
    data: NDArray[np.uint8]
    scale: Scale | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (self.scale.values.nbytes if self.scale else 0)
