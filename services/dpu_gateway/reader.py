"""Reads the lane's token log and hands each stream its own part."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from services.dpu_gateway.streams import Entries, Stream
from services.dpu_gateway.waiting import Waiting
from services.ring.errors import CorruptLogError
from services.ring.lane import LaneClient, LaneState
from services.ring.schema import FinishReason, LogKind
from services.ring.transport import PendingRead

# Plain numbers: an enum's members are looked up slowly.
TOKEN, TOP_LOGPROB, ADMITTED, FINISH = (
    int(kind) for kind in (LogKind.TOKEN, LogKind.TOP_LOGPROB, LogKind.ADMITTED, LogKind.FINISH)
)

Arrived = Callable[[Sequence[PendingRead]], Awaitable[None]]


class TokenReader:
    """One per worker: whatever the number of streams, a round is one look at the lane's head line and, if it moved,
    one bulk read. An entry costs a fraction of a microsecond, a stream that got something about one.

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
        self._unaccepted: deque[Stream] = deque()  # in order of position
        self._consumed_position = lane.next_position  # doorbells before it were taken as of the last round

    def add(self, stream: Stream) -> None:
        """A submission was made: its entries go to ``stream`` from now on."""
        self._streams[stream.slot] = stream
        self.live += 1
        self._unaccepted.append(stream)

    def stream_in(self, slot: int) -> Stream | None:
        """The one that the engine has not finished."""
        return self._streams[slot]

    def streams(self) -> list[Stream]:
        """All that the engine has not finished."""
        return [stream for stream in self._streams if stream is not None]

    async def look(self, arrived: Arrived, clock: Callable[[], float], gap: float) -> bool:
        """One round; whether tokens came. Raises RingError when the lane is lost.

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
        fed, finished = self._distribute(entries, now, woken_before) if len(entries) else (False, [])
        # Positions as of the round before: a refusal is published no later than the position behind it.
        while self._unaccepted and self._unaccepted[0].position < self._consumed_position:
            stream = self._unaccepted.popleft()
            if stream.finish is FinishReason.NONE:
                stream.accept()
        self._consumed_position = state.next_position
        self._lane.acknowledge()
        for stream in finished:
            self._on_finish(stream)
        return fed

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

    def _distribute(self, entries: Entries, now: float, woken_before: float) -> tuple[bool, list[Stream]]:
        """Hand out what came: whether there were tokens, and the streams that the engine has finished."""
        fed: dict[Stream, list[int]] = {}
        ends: list[tuple[Stream, int, int]] = []
        for tag, slot, kind, detail, token, value in entries.tolist():
            if slot >= len(self._streams):
                raise CorruptLogError(f"the log names slot {slot}, the lane has {len(self._streams)}")
            stream = self._streams[slot]
            if stream is None or stream.tag != tag:  # left from before this gateway took the lane
                continue
            if kind == TOKEN:
                fed.setdefault(stream, []).append(token)
            elif kind == TOP_LOGPROB:
                fed.setdefault(stream, [])
            elif kind == ADMITTED:
                stream.admit(value, token)
                self._waiting.remove(slot)
            elif kind == FINISH:
                ends.append((stream, detail, token))
        for stream, tokens in fed.items():
            stream.accept()
            if stream.with_logprobs:
                stream.feed_entries(_tokens_and_alternatives(entries[entries["tag"] == stream.tag]))
            else:
                stream.feed_tokens(tokens)
            self._wake_or_hold(stream, now, woken_before)
            if stream.unsent > self._max_unsent:
                self._on_slow(stream)
        for stream, detail, code in ends:
            self._end(stream, detail, code)
        return bool(fed), [stream for stream, _, _ in ends]

    def _end(self, stream: Stream, detail: int, code: int) -> None:
        self._streams[stream.slot] = None
        self._waiting.remove(stream.slot)
        self.live -= 1
        try:
            reason = FinishReason(detail)
        except ValueError as error:
            raise CorruptLogError(f"the log has an unknown finish reason: {error}") from error
        stream.end(reason, code)


def _tokens_and_alternatives(entries: Entries) -> Entries:
    kinds = entries["kind"]
    found: Entries = entries[(kinds == TOKEN) | (kinds == TOP_LOGPROB)]
    return found
