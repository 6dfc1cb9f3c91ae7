"""The interface between a gateway and the ring: one-sided writes and reads, nothing else.

No compare-and-swap and no message: what RDMA verbs, PCIe stores and plain stores can all do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class TransferCounters:
    """Operations since the transport was made; ``posts`` are the times that the far side had to be called for them."""

    writes: int = 0
    written_bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    posts: int = 0


class PendingRead:
    """A read under way; ``data`` once ``done``."""

    __slots__ = ("data", "done")

    def __init__(self) -> None:
        self.done = False
        self.data = b""

    def finish(self, data: bytes) -> None:
        self.data = data
        self.done = True


class Transport(ABC):
    """A ring's bytes, from its start, as seen by a gateway.

    Ordering, which is all that the ring's protocol relies on:

    - Aligned 64-bit words are never torn, neither by a write nor by a read.
    - Payload writes may become visible in any order and piecemeal; two writes of the same word stay in order.
    - A flag becomes visible after every write issued before it.
    - A read sees all that was written before any value that an earlier read returned.

    Every method raises TransportLostError once the far side is gone or the transport is closed. Not thread-safe: one
    gateway worker owns it.
    """

    def __init__(self, size: int, largest_read: int | None = None) -> None:
        self.size = size
        self.largest_read = size if largest_read is None else largest_read  # bytes of one start_read
        self.counters = TransferCounters()

    @abstractmethod
    def write(self, offset: int, data: bytes, *, flag: bool = False) -> None:
        """Write ``data`` at ``offset``. A flag is one aligned 64-bit word (8 bytes, little endian).

        Raises:
            IndexError: the range leaves the ring, or a flag is not one aligned word.
        """

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Copy ``length`` bytes from ``offset``. Raises IndexError when the range leaves the ring."""

    def publish(self, offset: int, data: bytes, flag_offset: int, word: bytes) -> None:
        """Write ``data``, then ``word`` as a flag: two writes, which a transport may send off together."""
        self.write(offset, data)
        self.write(flag_offset, word, flag=True)

    def start_read(self, offset: int, length: int) -> PendingRead:
        """Begin a read of at most ``largest_read`` bytes and go on; ``progress`` finishes it."""
        pending = PendingRead()
        pending.finish(self.read(offset, length))
        return pending

    def progress(self) -> None:  # noqa: B027 (a transport whose reads are done at once has nothing to do)
        """Finish the reads whose data has come. Never waits."""

    @property
    def busy(self) -> bool:
        """Whether so much is under way that a few more writes may have to wait for it, until ``progress`` ends some."""
        return False

    def complete(self, reads: Iterable[PendingRead]) -> None:
        """Return when all of them are done."""
        for read in reads:
            while not read.done:
                self.progress()

    @abstractmethod
    def flush(self) -> None:
        """Return when every earlier write has reached the ring."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the ring; may be called twice."""
