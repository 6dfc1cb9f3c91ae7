"""A transport for tests: a plain buffer whose link is as bad as the transport's contract allows, or worse.

With no faults it behaves as memory does. With faults, writes wait in flight until ``step`` or ``flush`` delivers them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from services.ring.errors import TransportLostError
from services.ring.memory import MemoryTransport, Region

WORD_BYTES = 8


@dataclass(frozen=True)
class Faults:
    """What the link does to writes in flight; all that is delivered is chosen by ``seed``."""

    reorder: bool = False  # payload writes that do not overlap pass each other, and a later payload passes a flag
    tear: bool = False  # a payload write arrives one 64-bit word at a time
    flags_overtake: bool = False  # BROKEN on purpose: flags pass earlier writes, which the contract forbids
    seed: int = 0


@dataclass(frozen=True)
class _InFlight:
    offset: int
    data: bytes
    flag: bool

    def overlaps(self, other: _InFlight) -> bool:
        return self.offset < other.offset + len(other.data) and other.offset < self.offset + len(self.data)


class LoopbackTransport(MemoryTransport):
    """``region`` is the ring, from its start; several transports may share it."""

    def __init__(self, region: Region, faults: Faults | None = None) -> None:
        super().__init__(region)
        self._faults = faults
        self._random = random.Random(faults.seed if faults else 0)  # noqa: S311 - faults need no secrecy
        self._in_flight: list[_InFlight] = []

    @property
    def in_flight(self) -> int:
        """Pieces of writes that are not visible yet."""
        return len(self._in_flight)

    def write(self, offset: int, data: bytes, *, flag: bool = False) -> None:
        if self._faults is None:
            super().write(offset, data, flag=flag)
            return
        region = self._open_region()
        if not 0 <= offset <= region.size - len(data) or (flag and (len(data) != WORD_BYTES or offset % WORD_BYTES)):
            raise IndexError(f"write of {len(data)} bytes at {offset} (flag: {flag}) does not fit {region.size} bytes")
        if flag or not self._faults.tear:
            self._in_flight.append(_InFlight(offset, bytes(data), flag))
        else:
            start = offset
            while start < offset + len(data):
                end = min(start - start % WORD_BYTES + WORD_BYTES, offset + len(data))
                self._in_flight.append(_InFlight(start, data[start - offset : end - offset], flag=False))
                start = end
        self.counters.writes += 1
        self.counters.written_bytes += len(data)

    def step(self) -> bool:
        """Deliver one piece; False when nothing is in flight."""
        self._open_region()
        if not self._in_flight:
            return False
        piece = self._in_flight.pop(self._next())
        super().write(piece.offset, piece.data, flag=piece.flag)
        self.counters.writes -= 1  # counted when it was issued
        self.counters.written_bytes -= len(piece.data)
        return True

    def flush(self) -> None:
        super().flush()
        while self.step():
            pass

    def lose_peer(self) -> None:
        """The far side is gone: what is in flight never arrives, and every later operation fails."""
        self._in_flight.clear()
        self.close()

    def _open_region(self) -> Region:
        try:
            return super()._open_region()
        except TransportLostError:
            raise TransportLostError("the loopback's peer is gone") from None

    def _next(self) -> int:
        """Index of the piece to deliver."""
        assert self._faults is not None
        if self._faults.flags_overtake:
            flags = [index for index, piece in enumerate(self._in_flight) if piece.flag]
            if flags:
                return flags[0]
        if not self._faults.reorder:
            return 0
        allowed = [
            index
            for index, piece in enumerate(self._in_flight)
            if index == 0
            or (not piece.flag and not any(piece.overlaps(earlier) for earlier in self._in_flight[:index]))
        ]
        return self._random.choice(allowed)
