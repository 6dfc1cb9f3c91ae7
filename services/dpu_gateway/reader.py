"""Reads the lane's token log and hands each stream its own part."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt

from services.dpu_gateway.streams import Entries, Stream
from services.dpu_gateway.waiting import Waiting
from services.ring.errors import CorruptLogError
from services.ring.lane import LaneClient, LaneState
from services.ring.schema import FinishReason, LogKind
from services.ring.transport import PendingRead

Arrived = Callable[[Sequence[PendingRead]], Awaitable[None]]


class TokenReader:
    """One per worker: whatever the number of streams, a round is one look at the lane's head line and, if it moved,
    one bulk read, demultiplexed by numpy. Python work is per stream that got something, never per token.

    A stream is woken for tokens at most once every ``gap`` seconds of the cadence, by ``wake``, which may take its
    time; first tokens and ends wake it at once, before all others.
    ``on_finish`` is called for each stream that the engine has finished, after the log's tail was written;
    ``on_slow`` for each that leaves more than ``max_unsent`` entries lying. ``waiting`` hears who is admitted.
    """

    def __init__(
        self,
        lane: LaneClient,
        max_unsent: int,
        on_finish: Callable[[Stream], None],
        on_slow: Callable[[Stream], None],
        waiting: Waiting,
        *,
        wake: Callable[[Stream], None] = Stream.wake,
    ) -> None:
        slots = lane.geometry.slots_per_lane
        self._lane = lane
        self._max_unsent = max_unsent
        self._on_finish = on_finish
        self._on_slow = on_slow
        self._waiting = waiting
        self._wake = wake
        self._streams: list[Stream | None] = [None] * slots
        self._held: list[Stream] = []  # fed, to be woken when their gap is over
        self.live = 0  # streams that the engine has not finished
        self._tags: npt.NDArray[np.uint32] = np.zeros(slots, np.uint32)  # 0: no live submission
        self._unaccepted: deque[Stream] = deque()  # in order of position
        self._consumed_position = lane.next_position  # doorbells before it were taken as of the last round

    def add(self, stream: Stream) -> None:
        """A submission was made: its entries go to ``stream`` from now on."""
        self._streams[stream.slot] = stream
        self._tags[stream.slot] = stream.tag
        self.live += 1
        self._unaccepted.append(stream)

    def stream_in(self, slot: int) -> Stream | None:
        """The one that the engine has not finished."""
        return self._streams[slot]

    def streams(self) -> list[Stream]:
        """All that the engine has not finished."""
        return [stream for stream in self._streams if stream is not None]

    async def look(self, arrived: Arrived, clock: Callable[[], float], gap: float) -> bool:
        """One round; whether there was anything new. Raises RingError when the lane is lost.

        ``arrived`` waits for reads: over RDMA the event loop detokenizes earlier tokens meanwhile.
        """
        head = self._lane.start_poll()
        await arrived([head])
        state = self._lane.poll(head)
        reads = self._lane.start_log()
        await arrived(reads)
        return self._take(self._lane.read_log(reads), state, clock(), gap)

    def poll(self, now: float = 0.0, gap: float = 0.0) -> bool:
        """``look`` at time ``now``, for callers without an event loop: waits for what it reads."""
        state = self._lane.poll()
        return self._take(self._lane.read_log(), state, now, gap)

    def _take(self, entries: Entries, state: LaneState, now: float, gap: float) -> bool:
        woken_before = now - gap  # streams last woken before this may be woken again
        if self._held:
            self._wake_held(now, woken_before)
        finished = self._distribute(entries, now, woken_before) if len(entries) else []
        # Positions as of the round before: a refusal is published no later than the position behind it.
        while self._unaccepted and self._unaccepted[0].position < self._consumed_position:
            stream = self._unaccepted.popleft()
            if stream.finish is FinishReason.NONE:
                stream.accept()
        self._consumed_position = state.next_position
        self._lane.acknowledge()
        for stream in finished:
            self._on_finish(stream)
        return len(entries) > 0

    def _wake_held(self, now: float, woken_before: float) -> None:
        still = []
        for stream in self._held:
            if stream.woken_at <= woken_before:
                stream.held = False
                stream.woken_at = now
                self._wake(stream)
            else:
                still.append(stream)
        self._held = still

    def _wake_or_hold(self, stream: Stream, now: float, woken_before: float) -> None:
        if not stream.woken_at:  # its first tokens
            stream.woken_at = now
            stream.wake()
        elif stream.woken_at <= woken_before:
            stream.woken_at = now
            self._wake(stream)
        elif not stream.held:
            stream.held = True
            self._held.append(stream)

    def _distribute(self, entries: Entries, now: float, woken_before: float) -> list[Stream]:
        if int(entries["slot"].max()) >= len(self._streams):
            raise CorruptLogError(f"the log names slot {int(entries['slot'].max())}, the lane has {len(self._streams)}")
        live = self._tags[entries["slot"]] == entries["tag"]
        if not live.all():  # left from before this gateway took the lane
            entries = entries[live]
            if not len(entries):
                return []
        entries = entries[np.argsort(entries["slot"], kind="stable")]
        slots, kinds = entries["slot"], entries["kind"]
        is_token = kinds == LogKind.TOKEN
        tokens = entries["token"][is_token].tolist()
        starts = np.flatnonzero(np.concatenate(([True], slots[1:] != slots[:-1])))
        bounds = np.append(starts, len(entries))
        token_bounds = np.concatenate(([0], np.cumsum(is_token)))[bounds].tolist()
        first_kinds = kinds[starts].tolist()
        bounds_list = bounds.tolist()
        for index, slot in enumerate(slots[starts].tolist()):
            stream = self._streams[slot]
            if stream is None or first_kinds[index] == LogKind.FINISH:
                continue
            stream.accept()
            start, end = token_bounds[index], token_bounds[index + 1]
            if end == start:
                continue
            if stream.with_logprobs:
                self._feed_entries(stream, entries[bounds_list[index] : bounds_list[index + 1]])
            else:
                stream.feed_tokens(tokens[start:end])
            self._wake_or_hold(stream, now, woken_before)
            if stream.unsent > self._max_unsent:
                self._on_slow(stream)
        for entry in entries[kinds == LogKind.ADMITTED]:
            stream = self._streams[int(entry["slot"])]
            if stream is not None:
                stream.admit(float(entry["value"]), int(entry["token"]))
                self._waiting.remove(stream.slot)
        return self._end(entries[kinds == LogKind.FINISH])

    @staticmethod
    def _feed_entries(stream: Stream, entries: Entries) -> None:
        kinds = entries["kind"]
        wanted = entries[(kinds == LogKind.TOKEN) | (kinds == LogKind.TOP_LOGPROB)]
        if len(wanted):
            stream.feed_entries(wanted)

    def _end(self, entries: Entries) -> list[Stream]:
        finished = []
        for entry in entries:
            slot = int(entry["slot"])
            stream = self._streams[slot]
            if stream is None:
                continue
            self._streams[slot] = None
            self._waiting.remove(slot)
            self._tags[slot] = 0
            self.live -= 1
            try:
                reason = FinishReason(int(entry["detail"]))
            except ValueError as error:
                raise CorruptLogError(f"the log has an unknown finish reason: {error}") from error
            stream.end(reason, int(entry["token"]))
            finished.append(stream)
        return finished
