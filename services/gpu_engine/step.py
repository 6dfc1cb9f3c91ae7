"""One ragged step as an executor reads it (docs/architecture.md, "The engine's step")."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class Step(Protocol):
    """Rows are sequences, decode and prefill alike; a row's tokens are contiguous. The scheduling core's ``Step``."""

    @property
    def tokens(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def token_ids(self) -> Ints:
        """[tokens]"""

    @property
    def positions(self) -> Ints:
        """[tokens]"""

    @property
    def row_start(self) -> Ints:
        """[rows + 1]"""

    @property
    def kv_length(self) -> Ints:
        """[rows]"""

    @property
    def sequence(self) -> Ints:
        """[rows]"""

    @property
    def page_table(self) -> Ints:
        """[max_running, pages_per_sequence]"""

    @property
    def sample_row(self) -> Ints:
        """[samples]"""

    @property
    def sampling(self) -> NDArray[np.void]:
        """[samples] of ROW_SAMPLING"""

    @property
    def history(self) -> NDArray[np.uint32]:
        """[lanes * arena words]"""
