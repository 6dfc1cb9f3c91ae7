"""Hypothesis drives core and model through the same history; they must agree on every row and every log entry."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from services.ring import _atomics, dtypes, schema
from services.ring.schema import Command, DescriptorFlag, FinishReason, LogKind
from tests.gpu_engine.core.machine import EOS, VOCABULARY, Machine, expected_tokens, record
from tests.gpu_engine.core.model import Lane, Model, Submission

LANES, SLOTS = 3, 5
RECORD_SPACE = 512
SIZES: dict[str, Any] = {
    "lanes": LANES,
    "slots": SLOTS,
    "log_entries": 4 * SLOTS + schema.MAX_TOP_LOGPROBS + 1 + 30,
    "max_context": 40,
    "page_size": 4,
    "page_count": 12,
    "max_running": 4,
    "max_batched_tokens": 9,
    "max_waiting": 7,
    "priority_boost": 3,
    "lease_us": 60_000,
}

SUBMISSIONS = st.fixed_dictionaries(
    {
        "lane": st.integers(0, LANES - 1),
        "slot": st.integers(0, SLOTS - 1),
        "place": st.integers(0, 7),
        "prompt": st.binary(min_size=1, max_size=24).map(lambda data: [byte % VOCABULARY for byte in data])
        | st.builds(lambda first, size: [first, *range(10, 9 + size)], st.integers(0, 2), st.integers(1, 24)),
        "max_tokens": st.integers(1, 24),
        "min_tokens": st.integers(0, 3),
        "priority": st.integers(-2, 2),
        "time_limit_ms": st.sampled_from([0, 0, 0, 5, 20]),
        "top_logprobs": st.sampled_from([0, 0, 2, 20]),
        "seed": st.integers(0, 1 << 20) | st.just(1),
        "cache_salt": st.sampled_from([(0, 0), (0, 0), (0, 7), (7, 0)]),
        "flags": st.sampled_from([0, 0, 0, DescriptorFlag.NO_PREFIX_CACHE]),
    }
)


class CoreAndModel(RuleBasedStateMachine):
    """The gateways' words are written straight into the ring: attach, doorbells, cancels, tails, leases."""

    threads = 1
    prefix_cache = False
    share_decoded = False

    def __init__(self) -> None:
        super().__init__()
        cache = {"prefix_cache": self.prefix_cache, "share_decoded": self.share_decoded}
        self.machine = Machine(arena_bytes=1 << 12, threads=self.threads, **cache, **SIZES)
        self.model = Model(ends=frozenset({EOS}), **cache, **SIZES)
        self.epochs = 0
        self.in_step = False
        self.command = Command.RUN
        self.submissions: dict[tuple[int, int], Submission] = {}  # by (lane, tag)
        for lane in range(LANES):
            self.attach(lane)

    # What gateways do

    def write(self, lane: int, name: str, value: int) -> None:
        offset = self.machine.geometry.inbound(lane) + schema.LANE_INBOUND.offset_of(name)
        _atomics.store_release(self.machine.region, offset, value)

    def attach(self, lane: int) -> None:
        self.epochs += 1
        view = self.model.lanes[lane]
        geometry = self.machine.geometry
        start = geometry.inbound(lane) + geometry.doorbells_offset
        self.machine.region[start : geometry.arena(lane)] = 0
        view.doorbells.clear()
        view.cancels.clear()
        self.write(lane, "log_tail", 0)
        view.inbound_tail = 0
        self.renew(lane)
        self.write(lane, "gateway_epoch", self.epochs)
        view.inbound_epoch = self.epochs
        self.poll()

    def renew(self, lane: int) -> None:
        self.model.lanes[lane].lease += 1
        self.write(lane, "lease", self.model.lanes[lane].lease)

    def detach(self, lane: int) -> None:
        self.model.lanes[lane].inbound_epoch = 0
        self.write(lane, "gateway_epoch", 0)

    @rule(lane=st.integers(0, LANES - 1), how=st.sampled_from(["replace", "leave", "leave and return", "die"]))
    def change_hands(self, lane: int, how: str) -> None:
        if how in {"leave", "leave and return"}:
            self.detach(lane)
        if how == "die":
            for other in range(LANES):
                if other != lane:
                    self.renew(other)
            self.machine.tick(SIZES["lease_us"] + 1)
            self.poll()
        if how in {"replace", "leave and return"}:
            self.attach(lane)

    def owned(self, lane: int) -> Lane | None:
        view = self.model.lanes[lane]
        return view if view.epoch and view.epoch == view.inbound_epoch else None

    @rule(submissions=st.lists(SUBMISSIONS, min_size=1, max_size=6))
    def submit_some(self, submissions: list[dict[str, Any]]) -> None:
        for fields in submissions:
            self.submit(**fields)

    def submit(self, lane: int, slot: int, place: int, min_tokens: int, max_tokens: int, **fields: Any) -> None:
        view = self.owned(lane)
        if view is None or len(view.doorbells) == SLOTS:
            return
        asked = Submission(
            slot=slot,
            offset=place * RECORD_SPACE,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            **fields,
        )
        if any(set(asked.span) & set(other.span) for other in view.doorbells):
            return  # would change what a doorbell announces before the engine looks
        position = view.next_position + len(view.doorbells)
        view.doorbells.append(asked)
        self.submissions[lane, schema.submission_tag(position)] = asked
        wanted = {name: value for name, value in vars(asked).items() if name not in {"offset", "prompt"}}
        data = record(asked.prompt, **wanted)
        start = self.machine.geometry.arena(lane) + asked.offset
        self.machine.region[start : start + len(data)] = np.frombuffer(data, np.uint8)
        _atomics.store_release(
            self.machine.region,
            self.machine.geometry.doorbell(lane, position),
            schema.doorbell_word(position, asked.offset),
        )

    @rule(lane=st.integers(0, LANES - 1), which=st.integers(0, SLOTS))
    def cancel(self, lane: int, which: int) -> None:
        mine = [s for s in self.model.live if s.lane == lane]
        if self.owned(lane) is None or not mine:
            return
        sequence = mine[which % len(mine)]
        self.model.lanes[lane].cancels[sequence.asked.slot] = sequence.position
        offset = self.machine.geometry.cancel(lane, sequence.asked.slot)
        _atomics.store_release(self.machine.region, offset, sequence.position + 1)

    @rule(lane=st.integers(0, LANES - 1), behind=st.sampled_from([0, 0, 0, 3, -2, 1 << 40]))
    def acknowledge(self, lane: int, behind: int) -> None:
        """Sometimes a tail that goes back, or runs ahead of the head."""
        view = self.owned(lane)
        if view is None:
            return
        view.inbound_tail = (len(view.log) - behind) % (1 << 64)
        self.write(lane, "log_tail", view.inbound_tail)
        self.renew(lane)

    # What time and bootstrap do

    @rule(command=st.sampled_from([Command.DRAIN, Command.STOP]), polls=st.integers(0, 3))
    def order(self, command: Command, polls: int) -> None:
        self.set_command(command)
        self.run(polls, [])
        self.set_command(Command.RUN)

    def set_command(self, command: Command) -> None:
        self.command = command
        self.machine.set_command(command)

    # What the engine does

    @rule()
    def poll(self) -> None:
        self.machine.poll()
        self.model.poll(self.machine.now_us, self.command)

    @precondition(lambda self: not self.in_step)
    @rule()
    def plan(self) -> None:
        rows = self.model.plan()
        self.in_step = self.machine.plan()
        assert self.rows() == rows
        assert self.in_step == bool(rows)

    @precondition(lambda self: self.in_step)
    @rule()
    def commit(self) -> None:
        sampled = self.machine.execute()
        tops = (sampled[:, None] + np.arange(schema.MAX_TOP_LOGPROBS)).astype(np.int32)
        self.machine.scheduler.commit(
            self.machine.now_us, sampled, np.zeros(sampled.size, np.float32), tops, tops.astype(np.float32)
        )
        self.model.commit(sampled.tolist())
        self.in_step = False

    @rule(count=st.integers(1, 20), readers=st.lists(st.integers(0, LANES - 1), max_size=LANES))
    def run(self, count: int, readers: list[int]) -> None:
        for _ in range(count):
            self.machine.tick(500)
            for lane in range(LANES):
                self.renew(lane)
            for lane in readers:
                self.acknowledge(lane, 0)
            if self.in_step:
                self.commit()
            self.poll()
            self.plan()

    def rows(self) -> list[tuple[int, int, int, int]]:
        step = self.machine.scheduler.step
        found = []
        for row in range(step.rows):
            first, last = int(step.row_start[row]), int(step.row_start[row + 1])
            lane, slot = divmod(int(step.request[row]), SLOTS)
            found.append((lane, slot, int(step.positions[first]), last - first))
        return found

    # What must always hold

    @invariant()
    def pages_are_owned_once(self) -> None:
        self.machine.check_pages()
        assert self.machine.scheduler.free_pages == self.model.free_pages

    @invariant()
    def caches_agree(self) -> None:
        cached = sorted(tuple(prefix) for _, prefix in self.machine.scheduler.cached_prefixes())
        assert cached == sorted(key[1:] for key in self.model.prefixes.references)
        assert self.machine.scheduler.idle_pages == len(self.model.prefixes.idle)

    @invariant()
    def queues_agree(self) -> None:
        assert self.machine.scheduler.running == len(self.model.running)
        assert self.machine.scheduler.waiting == len(self.model.waiting)
        held = sum(len(s.asked.span) for s in self.model.live) // schema.LINE_BYTES
        assert self.machine.scheduler.held_arena_lines == held
        promised = sum(self.model.promised(lane) for lane in range(LANES))
        assert self.machine.scheduler.promised_log_entries == promised

    @invariant()
    def lanes_agree(self) -> None:
        for lane, view in enumerate(self.model.lanes):
            geometry = self.machine.geometry
            outbound = self.machine.region[geometry.outbound(lane) :][: schema.LANE_OUTBOUND.size].view(
                dtypes.LANE_OUTBOUND
            )[0]
            assert outbound["attached_epoch"] == view.epoch
            assert outbound["log_head"] == len(view.log)
            assert outbound["next_position"] == view.next_position
            log = self.machine.region[geometry.log(lane) :][: geometry.log_entries * 16].view(dtypes.LOG_ENTRY)
            for index in range(max(0, len(view.log) - geometry.log_entries), len(view.log)):
                entry = log[index % geometry.log_entries]
                got = (entry["tag"], entry["slot"], entry["kind"], entry["detail"], entry["token"])
                assert got == view.log[index]
            assert len(view.log) - view.tail <= geometry.log_entries

    def teardown(self) -> None:
        """Everything ends once the gateways read, and each finished stream is what it must be."""
        for _ in range(600):
            for lane in range(LANES):
                self.acknowledge(lane, 0)
            if self.in_step:
                self.commit()
            self.poll()
            self.plan()
            if not self.in_step and not self.model.live and not any(v.doorbells for v in self.model.lanes if v.epoch):
                break
        self.machine.check_empty()
        for lane, view in enumerate(self.model.lanes):
            self.check_streams(lane, view)

    def check_streams(self, lane: int, view: Lane) -> None:
        tokens: dict[int, list[int]] = {}
        for tag, _, kind, detail, token in view.log:
            if kind is LogKind.TOKEN:
                tokens.setdefault(tag, []).append(token)
            if kind is LogKind.FINISH and detail in (FinishReason.STOP, FinishReason.LENGTH):
                asked = self.submissions[lane, tag]
                expected = expected_tokens(
                    asked.prompt,
                    max_tokens=asked.max_tokens,
                    seed=asked.seed,
                    min_tokens=asked.min_tokens,
                    max_context=SIZES["max_context"],
                )
                assert (tokens[tag], detail) == expected


class ThreadedCoreAndModel(CoreAndModel):
    threads = 3


class CachingCoreAndModel(CoreAndModel):
    """Conversations too: prompts that go on where an earlier request's tokens ended."""

    prefix_cache = True

    @rule(submission=SUBMISSIONS, which=st.integers(0, 40), kept=st.integers(6, 30))
    def go_on(self, submission: dict[str, Any], which: int, kept: int) -> None:
        known = [*self.model.prefixes.references, *((None, *s.history) for s in self.model.live)]
        if known:
            salt, *tokens = known[which % len(known)]
            fields = submission | {"prompt": [*tokens, *submission["prompt"]][:kept]}
            self.submit(**(fields if salt is None else fields | {"cache_salt": salt}))


class SharingCoreAndModel(CachingCoreAndModel):
    share_decoded = True


class ThreadedCachingCoreAndModel(CachingCoreAndModel):
    threads = 3


class ThreadedSharingCoreAndModel(SharingCoreAndModel):
    threads = 3


def effort(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )


def test_the_core_does_what_the_model_does() -> None:
    run_state_machine_as_test(CoreAndModel, settings=effort(80, 40))


def test_a_block_of_threads_does_what_the_model_does() -> None:
    run_state_machine_as_test(ThreadedCoreAndModel, settings=effort(8, 30))


def test_the_core_caches_what_the_model_caches() -> None:
    run_state_machine_as_test(CachingCoreAndModel, settings=effort(80, 40))


def test_the_core_caches_answers_as_the_model_does() -> None:
    run_state_machine_as_test(SharingCoreAndModel, settings=effort(80, 40))


def test_a_block_of_threads_caches_what_the_model_caches() -> None:
    run_state_machine_as_test(ThreadedCachingCoreAndModel, settings=effort(8, 30))


def test_a_block_of_threads_caches_answers_as_the_model_does() -> None:
    run_state_machine_as_test(ThreadedSharingCoreAndModel, settings=effort(8, 30))
