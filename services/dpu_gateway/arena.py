"""Allocates the spans of a lane's arena: next fit, with neighbours merged when a span is freed."""

from __future__ import annotations

from bisect import bisect_left

from services.ring.schema import LINE_BYTES


class Arena:
    """Line-aligned spans of ``size`` bytes of arena.

    Next fit spreads requests over the arena like a circular buffer, so that spans are mostly freed in the order in
    which they were taken and the free list stays short. Allocation looks at each free span at most once.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts = [0]  # of the free spans, ascending
        self._lengths = {0: size}  # of the free spans, by start
        self._taken: dict[int, int] = {}  # length by start
        self._cursor = 0
        self._free = size

    @property
    def free_bytes(self) -> int:
        return self._free

    def allocate(self, length: int) -> int | None:
        """Take ``length`` bytes, rounded up to whole lines. Returns the offset, or None if no span is free."""
        length = -(-length // LINE_BYTES) * LINE_BYTES
        if length > self._free:
            return None
        first = bisect_left(self._starts, self._cursor)
        for step in range(len(self._starts)):
            index = (first + step) % len(self._starts)
            start = self._starts[index]
            if self._lengths[start] >= length:
                self._take(index, start, length)
                return start
        return None

    def _take(self, index: int, start: int, length: int) -> None:
        rest = self._lengths.pop(start) - length
        if rest:
            self._starts[index] = start + length
            self._lengths[start + length] = rest
        else:
            del self._starts[index]
        self._taken[start] = length
        self._free -= length
        self._cursor = start + length

    def length_at(self, start: int) -> int:
        """Bytes of the span that begins there. Raises KeyError if it was not taken."""
        return self._taken[start]

    def free(self, start: int) -> None:
        """Give a span back. Raises KeyError if it was not taken."""
        length = self._taken.pop(start)
        self._free += length
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + length:
            length += self._lengths.pop(self._starts.pop(index))
        if index and self._starts[index - 1] + self._lengths[self._starts[index - 1]] == start:
            self._lengths[self._starts[index - 1]] += length
            return
        self._starts.insert(index, start)
        self._lengths[start] = length
