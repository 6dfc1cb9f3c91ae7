"""Where a ring lies: one or two kinds of memory, as its owner lets NICs reach it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.ring.memory import Region


@dataclass(frozen=True)
class HostPart:
    """From ``start`` bytes into the ring on, in this process's memory."""

    start: int
    region: Region

    @property
    def length(self) -> int:
        return self.region.size


@dataclass(frozen=True)
class DmaBufPart:
    """From ``start`` bytes into the ring on, in memory that only a file descriptor names: a GPU's."""

    start: int
    length: int
    fd: int  # its first byte is the part's


RingParts = Sequence[HostPart | DmaBufPart]
