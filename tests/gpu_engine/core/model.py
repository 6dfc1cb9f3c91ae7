"""The scheduling core said again, slowly and obviously: lists of objects, no pages but their number, no ring.

It predicts every row of every step and every entry of every lane's log. Where the core keeps counters, sorted arrays
and bitmaps, the model counts, sorts and compares anew each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.ring.schema import (
    Command,
    DescriptorFlag,
    FinishReason,
    LogKind,
    RejectCode,
    record_bytes,
    submission_tag,
)
from tests.gpu_engine.core.prefix_model import PrefixModel

SUBMISSIONS_PER_POLL = 32

Entry = tuple[int, int, LogKind, int, int]  # tag, slot, kind, detail, token
Row = tuple[int, int, int, int]  # lane, slot, first position, tokens


@dataclass
class Submission:
    """What a gateway asks for, valid in itself; it may still meet a busy slot, a taken span or a full queue."""

    slot: int
    offset: int
    prompt: list[int]
    max_tokens: int
    min_tokens: int = 0
    priority: int = 0
    time_limit_ms: int = 0
    top_logprobs: int = 0
    seed: int = 0
    cache_salt: tuple[int, int] = (0, 0)
    flags: int = 0

    @property
    def span(self) -> range:
        return range(self.offset, self.offset + record_bytes(len(self.prompt), self.max_tokens))


@dataclass
class Sequence:
    lane: int
    position: int
    asked: Submission
    order: int
    arrival: int
    submitted_us: int
    history: list[int]
    computed: int = 0
    chunked: int = 0  # of them, the first ones that no row of one token computed
    planned: int = 0
    pages: int = 0
    cached: int = 0  # of its pages, the first ones
    running: bool = False
    admitted: bool = False
    ending: FinishReason | None = None
    silent: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.order, self.arrival

    @property
    def remaining(self) -> int:
        return len(self.history) - self.computed

    @property
    def width(self) -> int:
        return 1 + self.asked.top_logprobs


@dataclass
class Lane:
    inbound_epoch: int = 0
    lease: int = 0
    inbound_tail: int = 0
    doorbells: list[Submission] = field(default_factory=list)  # rung and not taken
    cancels: dict[int, int] = field(default_factory=dict)  # slot -> position

    epoch: int = 0
    last_epoch: int = 0
    lease_seen: int = 0
    lease_renewed_us: int = 0
    closing: bool = False
    next_position: int = 0
    round: int = 0
    log: list[Entry] = field(default_factory=list)
    tail: int = 0
    paused: bool = False
    step_promised: int = 0


class Model:
    def __init__(
        self,
        *,
        lanes: int,
        slots: int,
        log_entries: int,
        max_context: int,
        page_size: int,
        page_count: int,
        max_running: int,
        max_batched_tokens: int,
        max_waiting: int,
        priority_boost: int,
        lease_us: int,
        ends: frozenset[int],
        prefix_cache: bool = False,
        share_decoded: bool = False,
    ) -> None:
        self.lanes = [Lane() for _ in range(lanes)]
        self.slots = slots
        self.log_entries = log_entries
        self.max_context = max_context
        self.page_size = page_size
        self.page_count = page_count
        self.max_running = max_running
        self.budget = max_batched_tokens
        self.max_waiting = max_waiting
        self.boost = priority_boost
        self.lease_us = lease_us
        self.ends = ends
        self.prefixes = PrefixModel(page_size)
        self.prefix_cache = prefix_cache
        self.share_decoded = share_decoded
        self.command = Command.RUN
        self.live: list[Sequence] = []
        self.arrivals = 0
        self.virtual_round = 0
        self.preemptions = 0
        self.step: list[Sequence] = []

    # Views

    @property
    def running(self) -> list[Sequence]:
        return sorted((s for s in self.live if s.running), key=lambda s: s.key)

    @property
    def waiting(self) -> list[Sequence]:
        return sorted((s for s in self.live if not s.running), key=lambda s: s.key)

    @property
    def free_pages(self) -> int:
        """That nobody keeps from others, idle ones of the prefix cache among them."""
        own = sum(s.pages - s.cached for s in self.live)
        return self.page_count - own - len(self.prefixes.references) + len(self.prefixes.idle)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def room(self, lane: Lane) -> int:
        return self.log_entries - (len(lane.log) - lane.tail)

    def promised(self, index: int) -> int:
        return sum(1 if s.admitted else 2 for s in self.live if s.lane == index)

    def token_width(self, index: int) -> int:
        return sum(s.width for s in self.running if s.lane == index)

    # Poll

    def poll(self, now_us: int, command: Command) -> None:
        self.command = command
        for lane in self.lanes:
            self._watch(lane, now_us)
        for sequences in (self.running, self.waiting):
            for sequence in sequences:
                self._mark(sequence, now_us)
            self._release(sequences)
        for index, lane in enumerate(self.lanes):
            if lane.closing and not any(s.lane == index for s in self.live):
                lane.closing = False
            if not lane.epoch and not lane.closing and lane.inbound_epoch not in (0, lane.last_epoch):
                lane.epoch = lane.last_epoch = lane.inbound_epoch
                lane.lease_seen, lane.lease_renewed_us = lane.lease, now_us
                lane.tail = len(lane.log)
                lane.next_position += self.slots
        for index, lane in enumerate(self.lanes):
            if lane.epoch:
                self._take_submissions(index, lane, now_us)

    def _watch(self, lane: Lane, now_us: int) -> None:
        if not lane.epoch:
            return
        if lane.lease != lane.lease_seen:
            lane.lease_seen, lane.lease_renewed_us = lane.lease, now_us
        if lane.inbound_epoch != lane.epoch or now_us - lane.lease_renewed_us > self.lease_us:
            lane.epoch = 0
            lane.closing = True
        elif lane.tail <= lane.inbound_tail <= len(lane.log):
            lane.tail = lane.inbound_tail

    def _mark(self, sequence: Sequence, now_us: int) -> None:
        lane, limit = self.lanes[sequence.lane], sequence.asked.time_limit_ms
        if lane.closing:
            sequence.ending, sequence.silent = FinishReason.CANCELLED, True
        elif sequence.ending is not None:
            return
        elif self.command is Command.STOP:
            sequence.ending = FinishReason.SHUTDOWN
        elif lane.cancels.get(sequence.asked.slot) == sequence.position:
            sequence.ending = FinishReason.CANCELLED
        elif limit and now_us >= sequence.submitted_us + 1000 * limit:
            sequence.ending = FinishReason.TIME_LIMIT

    def _release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.ending is not None and not sequence.planned:
                self._give_back(sequence)
                self.live.remove(sequence)
                if not sequence.silent:
                    self._log(sequence, LogKind.FINISH, sequence.ending)

    def _log(self, sequence: Sequence, kind: LogKind, detail: int = 0, token: int = 0) -> None:
        tag = submission_tag(sequence.position)
        self.lanes[sequence.lane].log.append((tag, sequence.asked.slot, kind, int(detail), token))

    def _take_submissions(self, index: int, lane: Lane, now_us: int) -> None:
        for _ in range(SUBMISSIONS_PER_POLL):
            if not lane.doorbells or self.room(lane) < self.promised(index) + lane.step_promised + 2:
                return
            asked = lane.doorbells.pop(0)
            position = lane.next_position
            lane.next_position += 1
            mine = [s for s in self.live if s.lane == index]
            reason, code = FinishReason.NONE, RejectCode.NONE
            if any(s.asked.slot == asked.slot for s in mine):
                reason, code = FinishReason.REJECTED, RejectCode.SLOT_BUSY
            elif self.command is not Command.RUN:
                reason = FinishReason.SHUTDOWN
            elif self._queue_is_full(index):
                reason = FinishReason.QUEUE_FULL
            elif any(set(s.asked.span) & set(asked.span) for s in mine):
                reason, code = FinishReason.REJECTED, RejectCode.RECORD_OVERLAP
            if reason is not FinishReason.NONE:
                tag = submission_tag(position)
                lane.log.append((tag, asked.slot, LogKind.FINISH, int(reason), int(code)))
                continue
            lane.round = max(lane.round + 1, self.virtual_round)
            order = lane.round - asked.priority * self.boost
            self.live.append(Sequence(index, position, asked, order, self.arrivals, now_us, list(asked.prompt)))
            self.arrivals += 1

    def _queue_is_full(self, index: int) -> bool:
        mine = sum(s.lane == index for s in self.waiting)
        return len(self.waiting) >= self.max_waiting and mine >= max(1, self.max_waiting // len(self.lanes))

    # Plan

    def plan(self) -> list[Row]:
        for index, lane in enumerate(self.lanes):
            lane.paused = self.room(lane) < 2 * self.slots + self.token_width(index)
        self._admit()
        able = self._secure_pages()
        decode = [s for s in able if s.remaining == 1][: self.budget]
        self._take_pages(sum(self.pages_for(s.computed + 1) > s.pages for s in decode))
        for sequence in decode:
            sequence.pages = max(sequence.pages, self.pages_for(sequence.computed + 1))
            sequence.planned = 1
        left = self.budget - len(decode)
        prefill: list[Sequence] = []
        for sequence in (s for s in able if s.remaining > 1):
            sequence.planned = self._chunk(sequence.remaining, left, first=not prefill) if left else 0
            if not sequence.planned:
                break
            left -= sequence.planned
            prefill.append(sequence)
        self.step = decode + prefill
        for index, lane in enumerate(self.lanes):
            lane.step_promised = self.token_width(index) if self.step and not lane.paused else 0
        return [(s.lane, s.asked.slot, s.computed, s.planned) for s in self.step]

    def _chunk(self, wanted: int, room: int, *, first: bool) -> int:
        """The longest that leaves no token alone, if there is one."""
        fitting = [n for n in range(2, min(wanted, room) + 1) if wanted - n != 1]
        return max(fitting, default=room if first else 0)

    def _fits(self, sequence: Sequence) -> bool:
        shared = sum(self.prefixes.references[key] > 0 for key in self._found(sequence))
        pages = self.pages_for(len(sequence.history)) - shared
        return len(self.running) < self.max_running and pages <= self.free_pages

    # Pages and the prefix cache

    def _shares(self, sequence: Sequence) -> bool:
        return self.prefix_cache and not sequence.asked.flags & DescriptorFlag.NO_PREFIX_CACHE

    def _found(self, sequence: Sequence) -> list[tuple[object, ...]]:
        if not self._shares(sequence):
            return []
        keys = self.prefixes.keys(sequence.history[: len(sequence.history) - 2], sequence.asked.cache_salt)
        return self.prefixes.found(keys)

    def _shareable(self, sequence: Sequence) -> int:
        return sequence.computed if self.share_decoded else sequence.chunked

    def _take_pages(self, count: int) -> None:
        """``count`` of them must not be idle any longer."""
        missing = count - (self.free_pages - len(self.prefixes.idle))
        if missing > 0:
            self.prefixes.reclaim(max(missing, self.page_count // 64))

    def _publish(self, sequence: Sequence) -> None:
        if self._shares(sequence):
            keys = self.prefixes.keys(sequence.history[: self._shareable(sequence)], sequence.asked.cache_salt)
            self.prefixes.reference(keys[sequence.cached :])
            sequence.cached = max(sequence.cached, len(keys))

    def _give_back(self, sequence: Sequence) -> None:
        self._publish(sequence)
        keys = self.prefixes.keys(sequence.history, sequence.asked.cache_salt)[: sequence.cached]
        self.prefixes.release(keys)
        sequence.pages = sequence.cached = sequence.computed = sequence.chunked = 0

    def _own_pages(self, sequence: Sequence) -> int:
        keys = self.prefixes.keys(sequence.history, sequence.asked.cache_salt)[: sequence.cached]
        return sequence.pages - sequence.cached + sum(self.prefixes.references[key] == 1 for key in keys)

    def _admit(self) -> None:
        shut = {index for index, lane in enumerate(self.lanes) if lane.paused}
        displaced: Sequence | None = None
        for sequence in self.waiting:
            lane = self.lanes[sequence.lane]
            if sequence.lane in shut:
                continue
            if self.room(lane) < 2 * self.slots + self.token_width(sequence.lane) + sequence.width:
                shut.add(sequence.lane)
                continue
            if displaced is not None and displaced.key < sequence.key:
                return
            while not self._fits(sequence):
                victim = self._paused_victim()
                if victim is None:
                    victim = displaced = self._lower_priority_victim(sequence) or displaced
                    if victim is None or not victim.running:
                        break
                self._preempt(victim)
            if not self._fits(sequence):
                return
            found = self._found(sequence)
            self.prefixes.reference(found)
            self._take_pages(self.pages_for(len(sequence.history)) - len(found))
            sequence.running = True
            sequence.pages = self.pages_for(len(sequence.history))
            sequence.cached = len(found)
            sequence.computed = sequence.chunked = len(found) * self.page_size
            self.virtual_round = max(self.virtual_round, sequence.order + sequence.asked.priority * self.boost)
            if not sequence.admitted:
                sequence.admitted = True
                self._log(sequence, LogKind.ADMITTED, token=sequence.computed)

    def _paused_victim(self) -> Sequence | None:
        return next((s for s in reversed(self.running) if self.lanes[s.lane].paused), None)

    def _lower_priority_victim(self, sequence: Sequence) -> Sequence | None:
        """The last running one, if it and its like make room enough for ``sequence``."""
        pages = self.free_pages
        candidates = []
        for other in reversed(self.running):
            if other.asked.priority >= sequence.asked.priority or other.key < sequence.key:
                break
            candidates.append(other)
            pages += self._own_pages(other)
        return candidates[0] if candidates and pages >= self.pages_for(len(sequence.history)) else None

    def _preempt(self, sequence: Sequence) -> None:
        sequence.running = False
        self._give_back(sequence)
        self.preemptions += 1

    def _secure_pages(self) -> list[Sequence]:
        while True:
            able = [s for s in self.running if not self.lanes[s.lane].paused]
            decode = [s for s in able if s.remaining == 1][: self.budget]
            if sum(self.pages_for(s.computed + 1) > s.pages for s in decode) <= self.free_pages:
                return able
            victim = self._paused_victim() or self.running[-1]
            assert victim is not able[0], "the first must be able to run alone"
            self._preempt(victim)

    # Commit

    def commit(self, sampled: list[int]) -> None:
        """``sampled`` holds a token for each row whose known tokens are all computed."""
        samples = iter(sampled)
        prefill = any(s.planned > 1 for s in self.step)
        for sequence in self.step:
            if sequence.planned > 1 and sequence.chunked == sequence.computed:
                sequence.chunked += sequence.planned
            sequence.computed += sequence.planned
            sequence.planned = 0
            full = min(self._shareable(sequence), len(sequence.asked.prompt)) // self.page_size
            if prefill and sequence.cached < full:
                self._publish(sequence)
            if sequence.remaining:
                continue
            token = next(samples)
            if sequence.ending is not None:
                continue
            sequence.history.append(token)
            for i in range(sequence.asked.top_logprobs):
                self._log(sequence, LogKind.TOP_LOGPROB, token=token + i)
            self._log(sequence, LogKind.TOKEN, token=token)
            generated = len(sequence.history) - len(sequence.asked.prompt)
            if token in self.ends and generated > sequence.asked.min_tokens:
                sequence.ending = FinishReason.STOP
            elif generated == sequence.asked.max_tokens or len(sequence.history) == self.max_context:
                sequence.ending = FinishReason.LENGTH
        self.step = []
        self._release(self.running)
        for lane in self.lanes:
            lane.step_promised = 0
