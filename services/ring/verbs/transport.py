"""The gateway's side: the ring by one-sided RDMA writes and reads."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.wr import SGE, SendWR

from services.ring.errors import TransportLostError
from services.ring.memory import allocate_region
from services.ring.transport import Transport
from services.ring.verbs.device import e
from services.ring.verbs.grant import LaneGrant, RemoteRegion
from services.ring.verbs.queue_pair import LOCAL_ONLY, QueuePair
from services.ring.verbs.status import CompletionError, CompletionStatus

WORD_BYTES = 8
_WRITE, _READ = int(e.IBV_WR_RDMA_WRITE), int(e.IBV_WR_RDMA_READ)
_SIGNALED, _INLINE = int(e.IBV_SEND_SIGNALED), int(e.IBV_SEND_INLINE)
_SIGNALS_PER_QUEUE = 4


class VerbsTransport(Transport):
    """Takes over a queue pair whose address the ring's owner has been told, and the grant that it answered.

    A reliable connection executes writes in the order of posting and a read after the writes before it, which is more
    than the interface promises. Writes are posted and forgotten: one in depth / 4 asks for a completion, which frees
    the room of all before it. Short ones travel in their work request, others through a registered staging buffer.
    A read waits for its data. When an operation fails, this or a later method raises CompletionError, which names the
    completion's status, and the transport is lost.
    """

    def __init__(
        self,
        queue_pair: QueuePair,
        grant: LaneGrant,
        *,
        staging_bytes: int = 1 << 20,
        read_bytes: int = 1 << 18,
        operation_timeout: float = 5.0,
    ) -> None:
        """``operation_timeout`` (seconds) is the last resort: the queue pair's retries should end first."""
        super().__init__(grant.ring_bytes)
        self._queue_pair: QueuePair | None = queue_pair
        self.grant = grant
        self._regions = grant.regions
        self._timeout = operation_timeout
        self._lost = TransportLostError("the transport is closed")
        self._inline_bytes = queue_pair.limits.inline_bytes
        self._depth = queue_pair.limits.depth
        self._signal_every = self._depth // _SIGNALS_PER_QUEUE
        # One array: what inline writes are copied from, then staging, then the target of reads. Local access only.
        self._staging_start, self._staging_bytes = self._inline_bytes, staging_bytes
        self._read_start, self._read_bytes = self._inline_bytes + staging_bytes, read_bytes
        memory = allocate_region(self._read_start + read_bytes)
        self._memory, self._view, self._address = memory, memory.data, memory.ctypes.data
        self._local: Any = queue_pair.register(memory, LOCAL_ONLY)
        # One work request, changed for each operation: making one takes longer than posting it.
        self._piece: Any = SGE(self._address, 0, self._local.lkey)
        self._request: Any = SendWR(num_sge=1, sg=[self._piece])
        self._request.sg_list = self._piece
        self._posted = self._retired = 0  # work requests
        self._staged = self._staging_freed = 0  # bytes of staging, counted on
        self._signalled: deque[tuple[int, int]] = deque()  # (work request, value of _staged once it is done)
        queue_pair.connect(grant.queue_pair)

    def write(self, offset: int, data: bytes, *, flag: bool = False) -> None:
        region = self._region(offset, len(data), writable=True)
        if flag and (len(data) != WORD_BYTES or offset % WORD_BYTES):
            raise IndexError(f"a flag is one aligned word of {WORD_BYTES} bytes, got {len(data)} at {offset}")
        if len(data) <= self._inline_bytes:
            self._view[: len(data)] = data
            self._post(_WRITE, 0, len(data), region, offset, flags=_INLINE)
        else:
            self._write_staged(region, offset, data)
        self.counters.writes += 1
        self.counters.written_bytes += len(data)

    def read(self, offset: int, length: int) -> bytes:
        region = self._region(offset, length, writable=False)
        parts = []
        for done in range(0, length, self._read_bytes):
            part = min(self._read_bytes, length - done)
            self._fetch(region, offset + done, part)
            parts.append(bytes(self._view[self._read_start : self._read_start + part]))
        self.counters.reads += 1
        self.counters.read_bytes += length
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def flush(self) -> None:
        """By a read, as a write's acknowledgement says only that the peer's NIC has it; not counted."""
        self._check_open()
        self._fetch(self._regions[0], 0, WORD_BYTES)

    def close(self) -> None:
        if self._queue_pair is not None:
            self._queue_pair.close()
            self._queue_pair = None

    def _region(self, offset: int, length: int, *, writable: bool) -> RemoteRegion:
        self._check_open()
        for region in self._regions:
            if region.holds(offset, length) and (region.writable or not writable):
                return region
        verb = "write" if writable else "read"
        raise IndexError(f"{verb} of {length} bytes at {offset} is outside of what this gateway was granted")

    def _write_staged(self, region: RemoteRegion, offset: int, data: bytes) -> None:
        largest = self._staging_bytes // _SIGNALS_PER_QUEUE
        for done in range(0, len(data), largest):
            part = data[done : done + largest]
            start = self._staged % self._staging_bytes
            if start + len(part) > self._staging_bytes:  # in one piece: what is left at the end stays unused
                self._staged += self._staging_bytes - start
                start = 0
            self._staged += len(part)
            while self._staged - self._staging_freed > self._staging_bytes:
                self._wait(self._signalled[0][0])
            start += self._staging_start
            self._view[start : start + len(part)] = part
            # A quarter of staging at the most goes by without a signal, so there is always one to wait for.
            unsignalled = self._staged - (self._signalled[-1][1] if self._signalled else self._staging_freed)
            signal = _SIGNALED if unsignalled >= largest else 0
            self._post(_WRITE, start, len(part), region, offset + done, flags=signal)

    def _fetch(self, region: RemoteRegion, offset: int, length: int) -> None:
        self._post(_READ, self._read_start, length, region, offset, flags=_SIGNALED)
        self._wait(self._posted)

    def _post(self, opcode: int, start: int, length: int, region: RemoteRegion, offset: int, *, flags: int) -> None:
        """Post one work request with ``length`` bytes at ``start`` of the local memory."""
        while self._posted - self._retired >= self._depth:
            self._wait(self._signalled[0][0])
        self._posted += 1
        last_signal = self._signalled[-1][0] if self._signalled else self._retired
        if self._posted - last_signal >= self._signal_every:
            flags |= _SIGNALED
        piece, request = self._piece, self._request
        piece.addr, piece.length = self._address + start, length
        request.wr_id, request.opcode, request.send_flags = self._posted, opcode, flags
        request.set_wr_rdma(region.rkey, region.address + offset - region.offset)
        if flags & _SIGNALED:
            self._signalled.append((self._posted, self._staged))
        assert self._queue_pair is not None
        try:
            self._queue_pair.sender.post_send(request)
        except PyverbsRDMAError as error:
            self._reap()  # its completion says why the queue pair is in error
            self._lose(TransportLostError(f"can't post an RDMA operation: {error}"))

    def _wait(self, number: int) -> None:
        """Until the work request ``number``, a signalled one, is done."""
        deadline = time.monotonic() + self._timeout
        while self._retired < number:
            if not self._reap():
                if time.monotonic() > deadline:
                    self._lose(TransportLostError(f"no completion of an RDMA operation within {self._timeout:g} s"))
                os.sched_yield()

    def _reap(self) -> bool:
        """Take what the completion queue holds; whether that was anything."""
        assert self._queue_pair is not None
        count, completions = self._queue_pair.completions.poll(_SIGNALS_PER_QUEUE)
        for completion in completions[:count]:
            if completion.status != CompletionStatus.SUCCESS:
                self._lose(CompletionError(completion.status))
            self._retired = completion.wr_id
            while self._signalled and self._signalled[0][0] <= self._retired:
                self._staging_freed = self._signalled.popleft()[1]
        return bool(count)

    def _lose(self, error: TransportLostError) -> None:
        self._lost = error
        self.close()
        raise error

    def _check_open(self) -> None:
        if self._queue_pair is None:
            raise self._lost.with_traceback(None)
