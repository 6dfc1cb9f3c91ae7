"""One lane of the stand-in engine: the engine's side of the ring protocol, vectorized over the lane's slots."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.ring import _atomics, dtypes, schema
from services.ring.memory import Region
from services.ring.schema import (
    Command,
    DescriptorFlag,
    EngineState,
    FinishReason,
    LanePhase,
    LogKind,
    RejectCode,
    RingGeometry,
    SlotPhase,
)

Tokens = npt.NDArray[np.uint32]
Script = Callable[[Tokens, int], Tokens]  # (prompt, max_tokens) -> tokens to generate; fewer than max_tokens ends STOP

LOGPROB = -0.5  # of every sampled token; the i-th alternative has LOGPROB - i


def echo(prompt: Tokens, max_tokens: int) -> Tokens:
    """Repeat the prompt until max_tokens: easy to check token by token."""
    return np.resize(prompt, max_tokens)


@dataclass
class Behaviour:
    """How the stand-in acts; may be changed while it runs."""

    script: Script = echo
    tokens_per_second: float | None = None  # of each request; None is as fast as possible
    burst: int = 16  # most tokens that a request gets in one step
    max_requests: int | None = None  # live in a lane; more end QUEUE_FULL
    max_running: int | None = None  # of them get tokens; the others wait for their turn, by priority
    cached_tokens: int = 0  # of each prompt, as if a prefix cache had them
    lease_timeout: float | None = None  # seconds; None never reclaims a lane
    heartbeat_frozen: bool = False  # the process lives but its loop is stuck, as a hung engine
    idle_sleep: float = 0.0002  # seconds between rounds that found nothing
    clock: Callable[[], float] = time.monotonic  # seconds
    first_position: int = 0  # where each lane's submissions and log entries begin to count, to reach wrap-around
    first_log_entry: int = 0


@dataclass
class LaneTotals:
    generated: int = 0
    rejected: int = 0


class StandInLane:
    """Per-slot arrays have the shape [slots_per_lane]."""

    def __init__(self, region: Region, geometry: RingGeometry, lane: int, behaviour: Behaviour) -> None:
        slots = geometry.slots_per_lane
        self.totals = LaneTotals()
        self.finished = np.zeros(len(FinishReason), np.uint64)  # by FinishReason
        self.live = np.zeros(slots, bool)
        self.descriptors: deque[np.void] = deque(maxlen=16)  # of the latest requests, dtypes.DESCRIPTOR
        self._region, self._geometry, self._lane, self._behaviour = region, geometry, lane, behaviour
        self._inbound, self._outbound = geometry.inbound(lane), geometry.outbound(lane)
        self._log = self._view(geometry.log(lane), dtypes.LOG_ENTRY, geometry.log_entries)
        self._cancels = self._view(geometry.cancel(lane, 0), np.dtype(np.uint64), slots)
        self._statuses = self._view(geometry.slot_status(lane), np.dtype(np.uint64), slots)
        status_offset = geometry.lane_status_offset + lane * schema.LANE_STATUS.size
        self._status = self._view(status_offset, dtypes.LANE_STATUS, 1)
        self._seen_epoch = 0  # last read
        self._served_epoch = 0
        self._head = self._tail = behaviour.first_log_entry
        self._position = behaviour.first_position
        self._lease = 0
        self._lease_seen_at = 0.0
        self._tags = np.zeros(slots, np.uint32)
        self._cancel_words = np.zeros(slots, np.uint64)  # that cancel the live submission
        self._running = np.zeros(slots, bool)  # which of the live ones get tokens
        self._order = np.zeros(slots, np.int64)  # in which waiting ones are admitted
        self._total = np.zeros(slots, np.int64)  # tokens to generate
        self._produced = np.zeros(slots, np.int64)
        self._reason = np.zeros(slots, np.uint8)  # with which it will end
        self._alternatives = np.zeros(slots, np.int64)  # TOP_LOGPROB entries of each token
        self._logprobs = np.zeros(slots, bool)
        self._started = np.zeros(slots)
        self._deadline = np.full(slots, np.inf)
        self._outputs = np.zeros((slots, 64), np.uint32)

    def poll(self, state: EngineState, command: Command) -> bool:
        """One round; whether anything happened.

        The epoch is read first, so all that is read after it is its owner's. Doorbells are read before cancels and the
        tail, which their gateway wrote earlier or aims at an earlier doorbell.
        """
        now = self._behaviour.clock()
        epoch = self._load(self._inbound + schema.LANE_INBOUND.offset_of("gateway_epoch"))
        if epoch != self._seen_epoch:  # an epoch is served once: not again after its lease ran out
            self._seen_epoch = epoch
            self._serve(epoch, now)
            return True
        if self._served_epoch == 0:
            return False
        busy = self._take_submissions(now, accept=state is EngineState.READY)
        if self._lease_ran_out(now):
            self._serve(0, now)
            return True
        busy |= self._end_early(now, stop=command is Command.STOP)
        busy |= self._admit(now)
        busy |= self._produce(now)
        if busy:
            self._publish()
        return busy

    def _serve(self, epoch: int, now: float) -> None:
        """Drop what is live and serve ``epoch``, 0 for nobody. The epoch is published last.

        Positions skip what the previous owner may have under way, so that none of it matches the new owner's.
        """
        self.live[:] = False
        self._statuses[:] = 0
        self._tail, self._served_epoch, self._lease_seen_at = self._head, epoch, now
        self._position += self._geometry.slots_per_lane
        self._store_outbound("attach_log_head", self._head)
        self._publish()
        self._store_outbound("attached_epoch", epoch)

    def _lease_ran_out(self, now: float) -> bool:
        tail = self._load(self._inbound + schema.LANE_INBOUND.offset_of("log_tail"))
        if self._tail <= tail <= self._head:  # else it is a previous owner's, or hostile
            self._tail = tail
        lease = self._load(self._inbound + schema.LANE_INBOUND.offset_of("lease"))
        if lease != self._lease:
            self._lease, self._lease_seen_at = lease, now
        timeout = self._behaviour.lease_timeout
        return timeout is not None and now - self._lease_seen_at > timeout

    def _take_submissions(self, now: float, *, accept: bool) -> bool:
        first = self._position
        while self._room() >= 2:  # ADMITTED and the end
            word = self._load(self._geometry.doorbell(self._lane, self._position))
            if word >> 32 != schema.submission_tag(self._position):
                break
            self._submit(word & 0xFFFF_FFFF, now, accept=accept)
            self._position += 1
        return self._position != first

    def _submit(self, line: int, now: float, *, accept: bool) -> None:
        tag = schema.submission_tag(self._position)
        offset = line * schema.LINE_BYTES
        if offset + schema.DESCRIPTOR.size > self._geometry.arena_bytes:
            self._refuse(tag, 0, FinishReason.REJECTED, RejectCode.BAD_RECORD)
            return
        start = self._geometry.arena(self._lane) + offset
        descriptor = np.frombuffer(_atomics.load(self._region, start, schema.DESCRIPTOR.size), dtypes.DESCRIPTOR)[0]
        slot, prompt_tokens = int(descriptor["slot"]), int(descriptor["prompt_tokens"])
        max_tokens = int(descriptor["max_tokens"])
        if slot >= self._geometry.slots_per_lane:
            self._refuse(tag, 0, FinishReason.REJECTED, RejectCode.BAD_SLOT)
        elif self.live[slot]:
            self._refuse(tag, slot, FinishReason.REJECTED, RejectCode.SLOT_BUSY)
        elif prompt_tokens == 0:
            self._refuse(tag, slot, FinishReason.REJECTED, RejectCode.EMPTY_PROMPT)
        elif max_tokens == 0:
            self._refuse(tag, slot, FinishReason.REJECTED, RejectCode.BAD_TOKEN_BUDGET)
        elif offset + schema.record_bytes(prompt_tokens, max_tokens) > self._geometry.arena_bytes:
            self._refuse(tag, slot, FinishReason.REJECTED, RejectCode.BAD_RECORD)
        elif not accept:
            self._refuse(tag, slot, FinishReason.SHUTDOWN)
        elif self._behaviour.max_requests is not None and np.count_nonzero(self.live) >= self._behaviour.max_requests:
            self._refuse(tag, slot, FinishReason.QUEUE_FULL)
        else:
            ids = _atomics.load(self._region, start + schema.DESCRIPTOR.size, 4 * prompt_tokens)
            self._queue(tag, slot, descriptor, np.frombuffer(ids, np.uint32), now)

    def _queue(self, tag: int, slot: int, descriptor: np.void, prompt: Tokens, now: float) -> None:
        self.descriptors.append(descriptor)
        max_tokens, limit = int(descriptor["max_tokens"]), int(descriptor["time_limit_ms"])
        output = self._behaviour.script(prompt, max_tokens)[:max_tokens]
        if output.size > self._outputs.shape[1]:
            grown = np.zeros((self._outputs.shape[0], 2 * output.size), np.uint32)
            grown[:, : self._outputs.shape[1]] = self._outputs
            self._outputs = grown
        self._outputs[slot, : output.size] = output
        self.live[slot] = True
        self._tags[slot] = tag
        self._cancel_words[slot] = self._position + 1
        self._total[slot], self._produced[slot] = output.size, 0
        self._reason[slot] = FinishReason.LENGTH if output.size == max_tokens else FinishReason.STOP
        self._alternatives[slot] = descriptor["top_logprobs"]
        self._logprobs[slot] = bool(int(descriptor["flags"]) & DescriptorFlag.LOGPROBS)
        self._deadline[slot] = now + limit / 1000 if limit else np.inf
        self._running[slot] = False
        self._order[slot] = self._position - (int(descriptor["priority"]) << 32)
        self._statuses[slot] = schema.slot_status_word(tag, SlotPhase.WAITING, FinishReason.NONE)

    def _admit(self, now: float) -> bool:
        """Let as many of the waiting ones run as may."""
        slots = np.flatnonzero(self.live & ~self._running)
        if self._behaviour.max_running is not None:
            free = max(0, self._behaviour.max_running - int(np.count_nonzero(self.live & self._running)))
            slots = slots[np.argsort(self._order[slots])][:free]
        for slot in slots.tolist():
            self._running[slot], self._started[slot] = True, now
            tag = int(self._tags[slot])
            self._statuses[slot] = schema.slot_status_word(tag, SlotPhase.RUNNING, FinishReason.NONE)
            self._append(
                np.array([(tag, slot, LogKind.ADMITTED, 0, self._behaviour.cached_tokens, 0.0)], dtypes.LOG_ENTRY)
            )
        return bool(slots.size)

    def _refuse(self, tag: int, slot: int, reason: FinishReason, code: RejectCode = RejectCode.NONE) -> None:
        self.finished[reason] += 1
        self.totals.rejected += 1
        self._append(np.array([(tag, slot, LogKind.FINISH, reason, code, 0.0)], dtypes.LOG_ENTRY))

    def _end_early(self, now: float, *, stop: bool) -> bool:
        """End what was cancelled, ran out of time or is stopped."""
        ended = False
        for mask, reason in (
            (self.live & (self._cancels == self._cancel_words), FinishReason.CANCELLED),
            (self.live & (self._deadline <= now), FinishReason.TIME_LIMIT),
            (self.live & stop, FinishReason.SHUTDOWN),
        ):
            slots = np.flatnonzero(mask & self.live)
            if slots.size:
                self._reason[slots] = reason
                self._finish(slots)
                ended = True
        return ended

    def _produce(self, now: float) -> bool:
        """Give each live request its next tokens, as many as rate, burst and the log's room allow."""
        slots = np.flatnonzero(self.live & self._running)
        if not slots.size:
            return False
        behaviour = self._behaviour
        due = self._total[slots]
        if behaviour.tokens_per_second is not None:
            due = np.minimum(due, ((now - self._started[slots]) * behaviour.tokens_per_second).astype(np.int64))
        count = np.clip(due - self._produced[slots], 0, behaviour.burst)
        entries_each = 1 + self._alternatives[slots]
        room = self._room()
        if (count * entries_each).sum() > room:
            count = np.minimum(count, max(1, room // int(entries_each.sum())))
            count[np.cumsum(count * entries_each) > room] = 0
        if count.any():
            self._append_tokens(slots, count)
            self._produced[slots] += count
            self.totals.generated += int(count.sum())
        done = slots[self._produced[slots] >= self._total[slots]]
        if done.size:
            self._finish(done)
        return bool(count.any()) or bool(done.size)

    def _append_tokens(self, slots: npt.NDArray[np.intp], count: npt.NDArray[np.int64]) -> None:
        """Log the next count[i] tokens of slots[i], requests taking turns."""
        turn, row = np.nonzero(np.arange(int(count.max()))[:, None] < count)
        slot = slots[row]
        token = self._outputs[slot, self._produced[slot] + turn]
        each = 1 + self._alternatives[slot]
        last = np.cumsum(each) - 1  # index of the TOKEN entry; its alternatives come before it
        entries = np.zeros(int(last[-1]) + 1, dtypes.LOG_ENTRY)
        rank = np.arange(entries.size) - np.repeat(last - each + 1, each)
        entries["tag"], entries["slot"] = np.repeat(self._tags[slot], each), np.repeat(slot, each)
        entries["kind"] = LogKind.TOP_LOGPROB
        entries["kind"][last] = LogKind.TOKEN
        entries["token"], entries["value"] = np.repeat(token, each) + rank, LOGPROB - rank
        entries["token"][last], entries["value"][last] = token, np.where(self._logprobs[slot], LOGPROB, 0)
        self._append(entries)

    def _finish(self, slots: npt.NDArray[np.intp]) -> None:
        entries = np.zeros(slots.size, dtypes.LOG_ENTRY)
        entries["tag"], entries["slot"], entries["kind"] = self._tags[slots], slots, LogKind.FINISH
        entries["detail"] = self._reason[slots]
        self.live[slots] = False
        self._statuses[slots] = self._tags[slots].astype(np.uint64) << np.uint64(32) | self._reason[slots]
        self.finished += np.bincount(self._reason[slots], minlength=len(FinishReason)).astype(np.uint64)
        self._append(entries)

    def _room(self) -> int:
        """Log entries that may be written while each live request keeps room for its end, and its admission."""
        kept = int(np.count_nonzero(self.live)) + int(np.count_nonzero(self.live & ~self._running))
        return self._geometry.log_entries - (self._head - self._tail) - kept

    def _append(self, entries: npt.NDArray[np.void]) -> None:
        first = self._head % self._geometry.log_entries
        before_wrap = min(entries.size, self._geometry.log_entries - first)
        self._log[first : first + before_wrap] = entries[:before_wrap]
        self._log[: entries.size - before_wrap] = entries[before_wrap:]
        self._head += entries.size

    def _publish(self) -> None:
        status = self._status
        status["generated_tokens"], status["rejected"] = self.totals.generated, self.totals.rejected
        status["phase"] = LanePhase.ATTACHED if self._served_epoch else LanePhase.FREE
        status["running"] = np.count_nonzero(self.live & self._running)
        status["waiting"] = np.count_nonzero(self.live & ~self._running)
        status["log_backlog"] = self._head - self._tail
        self._store_outbound("next_position", self._position)
        self._store_outbound("log_head", self._head)

    def _view(self, offset: int, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        return self._region[offset : offset + dtype.itemsize * count].view(dtype)

    def _load(self, offset: int) -> int:
        return _atomics.load_acquire(self._region, offset)

    def _store_outbound(self, field: str, value: int) -> None:
        _atomics.store_release(self._region, self._outbound + schema.LANE_OUTBOUND.offset_of(field), value)
