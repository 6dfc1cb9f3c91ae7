"""The gateway's side: the ring by one-sided RDMA writes and reads."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.wr import SGE, SendWR

from services.ring.errors import TransportLostError
from services.ring.memory import allocate_region
from services.ring.transport import PendingRead, Transport
from services.ring.verbs.device import Device, e
from services.ring.verbs.grant import LaneGrant, RemoteRegion
from services.ring.verbs.queue_pair import LOCAL_ONLY, QueuePair
from services.ring.verbs.staging import Circle
from services.ring.verbs.status import CompletionError, CompletionStatus

WORD_BYTES = 8
_WRITE, _READ = int(e.IBV_WR_RDMA_WRITE), int(e.IBV_WR_RDMA_READ)
_SIGNALED, _INLINE = int(e.IBV_SEND_SIGNALED), int(e.IBV_SEND_INLINE)
_SIGNALS_PER_QUEUE = 4


class _Signal(NamedTuple):
    """A work request that asked for a completion, and what is free once it is done."""

    number: int
    staged: int
    fetched: int
    read: PendingRead | None
    local: tuple[int, int]  # start and length of the read's data here


class _Request:
    """One work request with one piece of memory, used again for each operation: making one takes longer than posting
    it. ``then`` is the request that is always posted behind it."""

    def __init__(self, key: int, then: _Request | None = None) -> None:
        self._piece: Any = SGE(0, 0, key)
        self.request: Any = SendWR(num_sge=1, sg=[self._piece])
        self.request.sg_list = self._piece
        if then is not None:
            self.request.next_wr = then.request

    def fill(self, number: int, opcode: int, flags: int, *, local: int, length: int, key: int, remote: int) -> None:
        self._piece.addr, self._piece.length = local, length
        self.request.wr_id, self.request.opcode, self.request.send_flags = number, opcode, flags
        self.request.set_wr_rdma(key, remote)


class VerbsTransport(Transport):
    """Takes over a queue pair whose address the ring's owner has been told, and the grant that it answered.

    A reliable connection executes writes in the order of posting and a read after the writes before it, which is more
    than the interface promises. Writes are posted and forgotten: one in depth / 4 asks for a completion, which frees
    the room of all before it. Short ones travel in their work request, others through a registered staging buffer, and
    ``publish`` posts its two as one list. When an operation fails, this or a later method raises CompletionError, which
    names the completion's status, and the transport is lost.
    """

    def __init__(
        self,
        queue_pair: QueuePair,
        grant: LaneGrant,
        *,
        device: Device | None = None,
        staging_bytes: int = 1 << 20,
        read_bytes: int = 1 << 19,
        operation_timeout: float = 5.0,
    ) -> None:
        """Connect.

        Args:
            queue_pair: closed with this.
            grant: of the lane.
            device: closed with this too, when given.
            staging_bytes: writes that may be under way.
            read_bytes: reads that may be under way; half of it is the largest.
            operation_timeout: seconds; the last resort, as the queue pair's retries should end first.
        """
        super().__init__(grant.ring_bytes, largest_read=read_bytes // 2)
        self._queue_pair: QueuePair | None = queue_pair
        self._device = device
        self.grant = grant
        self._regions = grant.regions
        self._timeout = operation_timeout
        self._lost = TransportLostError("the transport is closed")
        self._inline_bytes = inline = queue_pair.limits.inline_bytes
        self._depth = queue_pair.limits.depth
        self._signal_every = self._depth // _SIGNALS_PER_QUEUE
        # One array: what inline writes are copied from (two, for publish), staging, the targets of reads.
        self._staging = Circle(2 * inline, staging_bytes)
        self._fetching = Circle(2 * inline + staging_bytes, read_bytes)
        memory = allocate_region(2 * inline + staging_bytes + read_bytes)
        self._memory, self._view, self._address = memory, memory.data, memory.ctypes.data
        self._local: Any = queue_pair.register(memory, LOCAL_ONLY)
        self._single = _Request(self._local.lkey)
        self._flag = _Request(self._local.lkey)
        self._payload = _Request(self._local.lkey, then=self._flag)
        self._posted = self._retired = 0  # work requests
        self._signalled: deque[_Signal] = deque()
        self._waiting_since = 0.0  # the last completion, or what was posted when none was awaited
        queue_pair.connect(grant.queue_pair)

    def write(self, offset: int, data: bytes, *, flag: bool = False) -> None:
        region = self._region(offset, len(data), writable=True)
        if flag:
            _check_flag(offset, data)
        largest = self._staging.size // _SIGNALS_PER_QUEUE
        for done in range(0, len(data), largest):
            part = data[done : done + largest]
            self._make_room(1)
            start, flags = self._stage(part)
            self._prepare(self._single, _WRITE, flags, local=(start, len(part)), remote=(region, offset + done))
            self._post(self._single)
        self._count_write(len(data))

    def publish(self, offset: int, data: bytes, flag_offset: int, word: bytes) -> None:
        region = self._region(offset, len(data), writable=True)
        flag_region = self._region(flag_offset, len(word), writable=True)
        _check_flag(flag_offset, word)
        if not 0 < len(data) <= self._staging.size // _SIGNALS_PER_QUEUE:
            super().publish(offset, data, flag_offset, word)
            return
        self._make_room(2)
        start, flags = self._stage(data)
        self._prepare(self._payload, _WRITE, flags & ~_SIGNALED, local=(start, len(data)), remote=(region, offset))
        self._view[self._inline_bytes : self._inline_bytes + WORD_BYTES] = word
        flags = flags & _SIGNALED | _INLINE
        local = (self._inline_bytes, WORD_BYTES)
        self._prepare(self._flag, _WRITE, flags, local=local, remote=(flag_region, flag_offset))
        self._post(self._payload)
        self._count_write(len(data))
        self._count_write(WORD_BYTES)

    def read(self, offset: int, length: int) -> bytes:
        region = self._region(offset, length, writable=False)
        largest = self.largest_read
        parts = [self._fetch(region, offset + done, min(largest, length - done)) for done in range(0, length, largest)]
        if parts:
            self._wait(self._posted)
        self.counters.reads += 1
        self.counters.read_bytes += length
        return parts[0].data if len(parts) == 1 else b"".join(part.data for part in parts)

    def start_read(self, offset: int, length: int) -> PendingRead:
        region = self._region(offset, length, writable=False)
        if not 0 < length <= self.largest_read:
            raise IndexError(f"a read of {length} bytes can't be started, at most {self.largest_read}")
        self.counters.reads += 1
        self.counters.read_bytes += length
        return self._fetch(region, offset, length)

    def progress(self) -> None:
        self._check_open()
        while self._reap():
            pass
        self._give_up_if_late()

    @property
    def busy(self) -> bool:
        """Half of the send queue or of the staging buffer is under way."""
        queue, staging = self._posted - self._retired, self._staging.taken - self._staging.freed
        return queue >= self._depth // 2 or staging >= self._staging.size // 2

    def complete(self, reads: Iterable[PendingRead]) -> None:
        if any(not read.done for read in reads):
            self._wait(self._signalled[-1].number)

    def flush(self) -> None:
        """By a read, as a write's acknowledgement says only that the peer's NIC has it; not counted."""
        self._check_open()
        self._fetch(self._regions[0], 0, WORD_BYTES)
        self._wait(self._posted)

    def close(self) -> None:
        if self._queue_pair is not None:
            self._queue_pair.close()
            self._queue_pair = None
            if self._device is not None:
                self._device.close()

    def _region(self, offset: int, length: int, *, writable: bool) -> RemoteRegion:
        self._check_open()
        for region in self._regions:
            if region.holds(offset, length) and (region.writable or not writable):
                return region
        verb = "write" if writable else "read"
        raise IndexError(f"{verb} of {length} bytes at {offset} is outside of what this gateway was granted")

    def _stage(self, data: bytes) -> tuple[int, int]:
        """Copy ``data`` to where the NIC takes it from: start in local memory, and flags of its work request."""
        if len(data) <= self._inline_bytes:
            self._view[: len(data)] = data
            return 0, _INLINE
        start = self._take(self._staging, len(data))
        self._view[start : start + len(data)] = data
        # A quarter of staging at the most goes by without a signal, so there is always one to wait for.
        last = self._signalled[-1].staged if self._signalled else self._staging.freed
        return start, _SIGNALED if self._staging.taken - last >= self._staging.size // _SIGNALS_PER_QUEUE else 0

    def _fetch(self, region: RemoteRegion, offset: int, length: int) -> PendingRead:
        pending = PendingRead()
        self._make_room(1)
        start = self._take(self._fetching, length)
        self._prepare(self._single, _READ, _SIGNALED, local=(start, length), remote=(region, offset), read=pending)
        self._post(self._single)
        return pending

    def _take(self, circle: Circle, length: int) -> int:
        start = circle.take(length)
        while circle.overfull:
            self._wait(self._signalled[0].number)
        return start

    def _make_room(self, requests: int) -> None:
        """In the send queue; drops what has retired already."""
        while self._posted + requests - self._retired > self._depth:
            self._wait(self._signalled[0].number)

    def _prepare(
        self,
        request: _Request,
        opcode: int,
        flags: int,
        *,
        local: tuple[int, int],
        remote: tuple[RemoteRegion, int],
        read: PendingRead | None = None,
    ) -> None:
        """Make ``request`` the next to be posted: between start and length here, and region and ring offset there."""
        (start, length), (region, offset) = local, remote
        self._posted += 1
        last_signal = self._signalled[-1].number if self._signalled else self._retired
        if self._posted - last_signal >= self._signal_every:
            flags |= _SIGNALED
        if flags & _SIGNALED:
            if not self._signalled:
                self._waiting_since = time.monotonic()
            self._signalled.append(_Signal(self._posted, self._staging.taken, self._fetching.taken, read, local))
        address = region.address + offset - region.offset
        request.fill(
            self._posted, opcode, flags, local=self._address + start, length=length, key=region.rkey, remote=address
        )

    def _post(self, first: _Request) -> None:
        assert self._queue_pair is not None
        self.counters.posts += 1
        try:
            self._queue_pair.sender.post_send(first.request)
        except PyverbsRDMAError as error:
            self._reap()  # its completion says why the queue pair is in error
            self._lose(TransportLostError(f"can't post an RDMA operation: {error}"))

    def _wait(self, number: int) -> None:
        """Until the work request ``number``, a signalled one, is done."""
        while self._retired < number:
            if not self._reap():
                self._give_up_if_late()
                os.sched_yield()

    def _give_up_if_late(self) -> None:
        """The last resort: the queue pair's own retries should have ended the wait."""
        if self._signalled and time.monotonic() - self._waiting_since > self._timeout:
            self._lose(TransportLostError(f"no completion of an RDMA operation within {self._timeout:g} s"))

    def _reap(self) -> bool:
        """Take what the completion queue holds; whether that was anything."""
        assert self._queue_pair is not None
        count, completions = self._queue_pair.completions.poll(_SIGNALS_PER_QUEUE)
        for completion in completions[:count]:
            if completion.status != CompletionStatus.SUCCESS:
                self._lose(CompletionError(completion.status))
            self._retired = completion.wr_id
            while self._signalled and self._signalled[0].number <= self._retired:
                self._retire(self._signalled.popleft())
            self._waiting_since = time.monotonic()
        return bool(count)

    def _retire(self, signal: _Signal) -> None:
        self._staging.freed, self._fetching.freed = signal.staged, signal.fetched
        if signal.read is not None:
            start, length = signal.local
            signal.read.finish(bytes(self._view[start : start + length]))

    def _count_write(self, length: int) -> None:
        self.counters.writes += 1
        self.counters.written_bytes += length

    def _lose(self, error: TransportLostError) -> None:
        self._lost = error
        self.close()
        raise error

    def _check_open(self) -> None:
        if self._queue_pair is None:
            raise self._lost.with_traceback(None)


def _check_flag(offset: int, word: bytes) -> None:
    if len(word) != WORD_BYTES or offset % WORD_BYTES:
        raise IndexError(f"a flag is one aligned word of {WORD_BYTES} bytes, got {len(word)} at {offset}")
