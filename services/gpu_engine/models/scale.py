"""Factors of a quantized tensor, one for each block of its values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Scale:
    """Value [i, j] of a matrix is what is stored there times ``values[(first_row + i) // rows, j // columns]``.

    One for the whole tensor, one for each row (``rows`` 1, ``columns`` all), or one for each block.

    Attributes:
        values: float32 [row blocks, column blocks].
        rows, columns: of a block.
        first_row: of the matrix in the tensor that ``values`` is of.
    """

    values: NDArray[np.float32]
    rows: int
    columns: int
    first_row: int = 0

    def of_row_blocks(self, start: int, stop: int) -> NDArray[np.float32]:
        """Of rows start to stop: float32 [stop - start, column blocks]."""
        return self.values[np.arange(self.first_row + start, self.first_row + stop) // self.rows]

    def of_rows(self, start: int, stop: int, columns: int, step: int = 1) -> NDArray[np.float32]:
        """Of rows start to stop, for every ``step``th of the columns: float32 [stop - start, ceil(columns / step)].

        ``step`` must divide the width of a block, unless that is all columns.
        """
        blocks = self.of_row_blocks(start, stop)
        return blocks[:, np.arange(0, columns, step) // self.columns]
