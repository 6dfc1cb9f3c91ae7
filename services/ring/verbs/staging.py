"""Room for operations under way, in the order in which they are posted and end."""

from __future__ import annotations


class Circle:
    """``size`` bytes from ``start``, taken and freed in the same order, each in one piece.

    Both counts only grow: ``taken`` when a piece is taken, ``freed`` when its user sets it to what ``taken`` was then.
    """

    def __init__(self, start: int, size: int) -> None:
        self.size = size
        self.taken = self.freed = 0
        self._start = start

    @property
    def overfull(self) -> bool:
        """Whether the piece last taken covers some that is not freed yet: wait before it is used."""
        return self.taken - self.freed > self.size

    def take(self, length: int) -> int:
        """Where the piece begins; what is left at the end, when too short for it, stays unused."""
        position = self.taken % self.size
        if position + length > self.size:
            self.taken += self.size - position
            position = 0
        self.taken += length
        return self._start + position
