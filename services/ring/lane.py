"""A gateway's view of its lane: attach, submit, cancel, read tokens, acknowledge.

Never loops: each method is a fixed number of one-sided operations. What reads waits for its data; who can't, an event
loop over RDMA, begins the same with ``start_poll`` and ``start_log`` and calls it once the read is done.
The order of writes that makes this safe is explained in docs/ring.md.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.ring import dtypes, schema
from services.ring.errors import AttachTimeoutError, CorruptLogError, LaneFullError, LaneLostError
from services.ring.schema import LINE_BYTES, RingGeometry
from services.ring.transport import PendingRead, Transport

_OUTBOUND = struct.Struct("<4Q")
_TWO_WORDS = struct.Struct("<2Q")
_LEASE_OFFSET = schema.LANE_INBOUND.offset_of("lease")
_EPOCH_OFFSET = schema.LANE_INBOUND.offset_of("gateway_epoch")
_SLOT = struct.Struct("<I")
_SLOT_OFFSET = schema.DESCRIPTOR.offset_of("slot")
_ENTRY_BYTES = schema.LOG_ENTRY.size
_NO_ENTRIES: npt.NDArray[np.void] = np.zeros(0, dtypes.LOG_ENTRY)
_RENEWALS_PER_LEASE = 4
_ACKNOWLEDGED_PARTS_OF_LOG = 8


class LaneState(NamedTuple):
    """LaneOutbound: all that a gateway polls."""

    attached_epoch: int
    log_head: int
    next_position: int
    attach_log_head: int


class LaneClient:
    """One gateway worker's side of one lane.

    ``gateway_epoch`` comes with the grant of the lane and is new for every attach. ``lease_timeout`` (seconds) is the
    engine's: once that long has passed since the last renewal, the engine may have given the lane away, so every
    method raises LaneLostError by itself rather than touch or believe what may be another gateway's.
    """

    def __init__(
        self,
        transport: Transport,
        geometry: RingGeometry,
        lane: int,
        *,
        gateway_epoch: int,
        lease_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= lane < geometry.lanes:
            raise ValueError(f"lane is {lane}, the ring has {geometry.lanes}")
        if not 0 < gateway_epoch < 1 << 64:
            raise ValueError(f"gateway_epoch is {gateway_epoch}, must be 1 to 2**64 - 1")
        self.lane = lane
        self.geometry = geometry
        self.gateway_epoch = gateway_epoch
        self.next_position = 0  # of the next submission
        self.log_tail = 0  # log entries read
        self._transport = transport
        self._clock = clock
        self._lease_timeout = lease_timeout
        self._lease = 0
        self._renewed_at = 0.0
        self._attached = False
        self._answered = False  # the engine's answer to begin_attach was seen
        self._acknowledged = 0  # log_tail as last written
        self._unacknowledged: set[int] = set()  # slots whose FINISH was read since
        self._state = LaneState(0, 0, 0, 0)
        self._inbound = geometry.inbound(lane)
        self._outbound = geometry.outbound(lane)
        self._arena = geometry.arena(lane)
        self._log = geometry.log(lane)

    # Attach

    def start_state(self) -> PendingRead:
        """Begin what ``begin_attach`` and ``attached`` read."""
        return self._transport.start_read(self._outbound, LINE_BYTES)

    def begin_attach(self, read: PendingRead | None = None) -> None:
        """Reset the lane's inbound area, then write the gateway epoch. Poll ``attached`` until the engine answers.

        Nothing of the previous owner can be taken for this one's: until the epoch is there the engine serves the
        previous owner, to whom emptied doorbells and cancels mean nothing new and a tail that goes back is ignored.

        Raises LaneLostError when this epoch was used before.
        """
        if self._state_of(read).attached_epoch == self.gateway_epoch:
            raise LaneLostError(
                f"lane {self.lane} is already attached under epoch {self.gateway_epoch}: ask for a new one"
            )
        self._attached = self._answered = False
        start = self.geometry.doorbells_offset
        self._transport.write(self._inbound + start, bytes(self.geometry.arena_offset - start))
        self._lease += 1
        self._transport.write(self._inbound + _LEASE_OFFSET, _TWO_WORDS.pack(self._lease, 0))
        self._write_flag(self._inbound + _EPOCH_OFFSET, self.gateway_epoch)

    def attached(self, read: PendingRead | None = None) -> bool:
        """Whether the engine serves this gateway; from then on the lane may be used.

        One read each time, or the one that ``start_state`` began since the last call. The engine writes the epoch last,
        so only a read that follows one with the epoch in it has all the rest: with ``read`` the answer to that first
        one is still no, without it another read is made. The yes renews the lease for the first time.
        """
        if self._attached:
            return True
        asked_at = self._clock()
        state = self._state_of(read)
        if state.attached_epoch != self.gateway_epoch:
            return False
        if not self._answered:
            self._answered = True
            self._renewed_at = asked_at
            if read is not None:
                return False
            state = self._state_of(None)
        self._state = state
        self.next_position = state.next_position
        self.log_tail = state.attach_log_head
        self._attached = True
        self.acknowledge(now=True)
        return True

    def attach(self, timeout: float = 5.0, poll_interval: float = 0.001) -> None:
        """``begin_attach`` and wait, for callers without an event loop. Raises AttachTimeoutError."""
        self.begin_attach()
        deadline = self._clock() + timeout
        while not self.attached():
            if self._clock() > deadline:
                raise AttachTimeoutError(f"the engine did not attach lane {self.lane} within {timeout} s")
            time.sleep(poll_interval)

    def detach(self) -> None:
        """Give the lane up: the engine cancels what is left of its requests. One write."""
        if self._attached:
            self._attached = False
            self._write_flag(self._inbound + _EPOCH_OFFSET, 0)

    # Requests

    def submit(self, record: bytes, record_offset: int) -> int:
        """Put a record (``pack_record``) into the arena and ring the doorbell: two writes, sent off together.

        One more acknowledges before them when the slot's last FINISH is not acknowledged yet, and all others with it.

        Returns the submission's position; its log entries carry ``schema.submission_tag(position)``.

        Raises:
            ValueError: the record leaves the arena or does not start on a line.
            LaneFullError: every doorbell is taken by a submission that the engine has not consumed.
            LaneLostError: see the class.
        """
        if record_offset % LINE_BYTES or not 0 <= record_offset <= self.geometry.arena_bytes - len(record):
            raise ValueError(
                f"record of {len(record)} bytes at {record_offset} must start on a {LINE_BYTES}-byte line "
                f"and end within the arena's {self.geometry.arena_bytes} bytes"
            )
        self._check_owned()
        position = self.next_position
        if position - self._state.next_position >= self.geometry.slots_per_lane:
            raise LaneFullError(self.lane, self.geometry.slots_per_lane)
        if self._unacknowledged and _SLOT.unpack_from(record, _SLOT_OFFSET)[0] in self._unacknowledged:
            self.acknowledge(now=True)
        word = schema.doorbell_word(position, record_offset).to_bytes(8, "little")
        doorbell = self.geometry.doorbell(self.lane, position)
        self._transport.publish(self._arena + record_offset, record, doorbell, word)
        self.next_position = position + 1
        return position

    def cancel(self, slot: int, position: int) -> None:
        """Give up the submission at ``position``, which occupies ``slot``: one write. Does nothing to a later one."""
        if not 0 <= slot < self.geometry.slots_per_lane:
            raise ValueError(f"slot is {slot}, the lane has {self.geometry.slots_per_lane}")
        self._check_owned()
        self._write_flag(self.geometry.cancel(self.lane, slot), position + 1)

    # Tokens

    def start_poll(self) -> PendingRead:
        """Begin what ``poll`` reads."""
        self._check_owned()
        return self.start_state()

    def poll(self, read: PendingRead | None = None) -> LaneState:
        """Read LaneOutbound: one 64-byte read, or the one that ``start_poll`` began.

        Raises LaneLostError when another gateway is served, or none.
        """
        self._check_owned()
        self._state = state = self._state_of(read)
        if state.attached_epoch != self.gateway_epoch:
            self._attached = False
            raise LaneLostError(
                f"lane {self.lane} is served to gateway epoch {state.attached_epoch}, no longer to {self.gateway_epoch}"
            )
        return state

    def start_log(self) -> list[PendingRead]:
        """Begin what ``read_log`` reads, at most the transport's largest read: one read, two around the log's end.

        Empty when nothing is new. Raises CorruptLogError when the engine's head went back, or ran over entries not yet
        read.
        """
        self._check_owned()
        tail, head, capacity = self.log_tail, self._state.log_head, self.geometry.log_entries
        if not 0 <= head - tail <= capacity:
            raise CorruptLogError(f"lane {self.lane}: log head is {head} with {tail} read, the log holds {capacity}")
        count = min(head - tail, self._transport.largest_read // _ENTRY_BYTES)
        first = tail % capacity
        before_wrap = min(count, capacity - first)
        spans = ((first, before_wrap), (0, count - before_wrap))
        return [
            self._transport.start_read(self._log + start * _ENTRY_BYTES, length * _ENTRY_BYTES)
            for start, length in spans
            if length
        ]

    def read_log(self, reads: list[PendingRead] | None = None) -> npt.NDArray[np.void]:
        """Log entries published up to the last ``poll`` and not yet returned, [entries] of dtypes.LOG_ENTRY, read-only.

        Those of ``start_log``'s finished ``reads``; without them they are read now. A transport whose reads are shorter
        than what is new leaves the rest to the next call.

        Raises:
            CorruptLogError: see ``start_log``.
            LaneLostError: see the class; entries read after the lease ran out may be another gateway's.
        """
        if reads is None:
            reads = self.start_log()
            self._transport.complete(reads)
        self._check_owned()
        if not reads:
            return _NO_ENTRIES
        entries: npt.NDArray[np.void] = np.frombuffer(b"".join(read.data for read in reads), dtypes.LOG_ENTRY)
        self.log_tail += len(entries)
        finished = entries["kind"] == schema.LogKind.FINISH
        if finished.any():
            self._unacknowledged.update(entries["slot"][finished].tolist())
        return entries

    def start_slot_statuses(self) -> PendingRead:
        """Begin what ``slot_statuses`` reads."""
        self._check_owned()
        return self._transport.start_read(self.geometry.slot_status(self.lane), 8 * self.geometry.slots_per_lane)

    def slot_statuses(self, read: PendingRead | None = None) -> npt.NDArray[np.uint64]:
        """All slots' status words (``schema.slot_status_word``), [slots_per_lane]: one bulk read, or the finished one
        that ``start_slot_statuses`` began."""
        if read is None:
            read = self.start_slot_statuses()
            self._transport.complete([read])
        self._check_owned()
        return np.frombuffer(read.data, np.uint64)

    def acknowledge(self, *, now: bool = False) -> bool:
        """Renew the lease and tell the engine what was read: one write, or none while neither is due.

        Due when an eighth of the log was read, or when a quarter of the lease has passed; ``submit`` does it before a
        slot is used again whose FINISH the engine does not know to be read. Call it after every ``read_log`` and at
        least that often.
        """
        self._check_owned()
        due = (
            now
            or self.log_tail - self._acknowledged >= self.geometry.log_entries // _ACKNOWLEDGED_PARTS_OF_LOG
            or self._clock() - self._renewed_at >= self._lease_timeout / _RENEWALS_PER_LEASE
        )
        if due:
            self._renewed_at = self._clock()  # before the write: the engine's clock starts after it
            self._lease += 1
            self._transport.write(self._inbound + _LEASE_OFFSET, _TWO_WORDS.pack(self._lease, self.log_tail))
            self._acknowledged = self.log_tail
            self._unacknowledged.clear()
        return due

    def _check_owned(self) -> None:
        if not self._attached:
            raise LaneLostError(f"lane {self.lane} is not attached under epoch {self.gateway_epoch}")
        if self._clock() - self._renewed_at >= self._lease_timeout:
            self._attached = False
            raise LaneLostError(
                f"lane {self.lane}: no lease renewal for {self._lease_timeout} s, the engine may have reclaimed it"
            )

    def _state_of(self, read: PendingRead | None) -> LaneState:
        """What the finished ``read`` holds; without one it is read now."""
        if read is None:
            read = self.start_state()
            self._transport.complete([read])
        return LaneState._make(_OUTBOUND.unpack_from(read.data))

    def _write_flag(self, offset: int, word: int) -> None:
        self._transport.write(offset, word.to_bytes(8, "little"), flag=True)
