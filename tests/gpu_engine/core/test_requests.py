"""One request's life: what it gets, how it ends, what the ring says of it."""

from __future__ import annotations

import numpy as np
import pytest

from services.ring import schema
from services.ring.schema import DescriptorFlag, FinishReason, SlotPhase
from tests.gpu_engine.core.machine import EOS, Machine, Stream, expected_tokens, next_token, record

PROMPT = [5, 9, 200, 41, 7]


def run_until_idle(machine: Machine, limit: int = 500) -> None:
    for _ in range(limit):
        if not machine.step() and machine.scheduler.idle:
            return
    raise AssertionError("no end in sight")


@pytest.mark.parametrize("budget", [1, 2, 3, 16])
def test_chunks_of_any_size_give_the_same_tokens(budget: int) -> None:
    machine = Machine(max_batched_tokens=budget)
    gateway = machine.attach()
    position = gateway.submit(record(PROMPT, max_tokens=20, seed=8), 0)
    run_until_idle(machine)
    gateway.read()
    stream = gateway.stream(position)
    assert (stream.tokens, stream.reason) == expected_tokens(PROMPT, max_tokens=20, seed=8)
    machine.check_empty()


def test_stop_tokens_end_the_request_and_are_published() -> None:
    machine = Machine()
    gateway = machine.attach()
    tokens, _ = expected_tokens(PROMPT, max_tokens=6)
    position = gateway.submit(record(PROMPT, max_tokens=6, stop_tokens=[tokens[3]]), 0)
    run_until_idle(machine)
    gateway.read()
    assert gateway.stream(position).tokens == tokens[:4]
    assert gateway.stream(position).reason is FinishReason.STOP


def seed_that_samples_eos_first() -> int:
    return next(seed for seed in range(5000) if next_token(np.array(PROMPT, np.int32), seed) == EOS)


def test_eos_ends_unless_ignored_and_min_tokens_suppresses_it() -> None:
    seed = seed_that_samples_eos_first()
    machine = Machine()
    gateway = machine.attach()
    plain = gateway.submit(record(PROMPT, slot=0, max_tokens=5, seed=seed), 0)
    ignoring = gateway.submit(record(PROMPT, slot=1, max_tokens=5, seed=seed, flags=DescriptorFlag.IGNORE_EOS), 1024)
    minimum = gateway.submit(record(PROMPT, slot=2, max_tokens=5, min_tokens=2, seed=seed), 2048)
    run_until_idle(machine)
    gateway.read()
    assert gateway.stream(plain).tokens == [EOS]
    assert gateway.stream(plain).reason is FinishReason.STOP
    assert gateway.stream(ignoring).tokens == expected_tokens(PROMPT, max_tokens=5, seed=seed, ends=frozenset())[0]
    assert gateway.stream(ignoring).tokens[0] == EOS
    assert gateway.stream(minimum).tokens == expected_tokens(PROMPT, max_tokens=5, seed=seed, min_tokens=2)[0]
    assert gateway.stream(minimum).tokens[0] == EOS + 1


def seed_that_stops(prompt: list[int], *, after: int, min_tokens: int) -> int:
    ends = (expected_tokens(prompt, max_tokens=after + 1, seed=seed, min_tokens=min_tokens) for seed in range(50_000))
    return next(seed for seed, (tokens, _) in enumerate(ends) if len(tokens) == after)


def served_beside_a_paused_lane(machine: Machine, asked: bytes, *, after: int, resume_after: int) -> Stream:
    """Serve ``asked`` after so many steps of another request, which goes first but whose lane's log is full after some
    22, and read that after so many tokens: so ``asked`` has the first row in between, and the second afterwards.
    """
    slow, quick = machine.attach(0), machine.attach(1)
    slow.submit(record(PROMPT, max_tokens=50, flags=DescriptorFlag.IGNORE_EOS), 0)
    for _ in range(after):
        machine.step()
    stream = quick.stream(quick.submit(asked, 0))
    first = len(machine.batch_sizes)
    while stream.reason is None:
        if len(stream.tokens) == resume_after:
            slow.read()
        assert machine.step()
        quick.read()
    rows = machine.batch_sizes[first + 1 :]  # without the prompt
    assert rows[resume_after - 2 : resume_after] == [1, 2]
    assert rows[-1] == 2
    return stream


def test_a_request_that_comes_back_to_its_row_past_its_minimum_may_end() -> None:
    """A row keeps a request's parameters between steps, but not what it must not sample before ``min_tokens``."""
    minimum, after = 8, 14
    seed = seed_that_stops(PROMPT, after=after, min_tokens=minimum)
    machine = Machine(lanes=2, slots=1, log_entries=25)
    asked = record(PROMPT, max_tokens=after + 1, min_tokens=minimum, seed=seed)
    stream = served_beside_a_paused_lane(machine, asked, after=20, resume_after=minimum + 2)
    assert (stream.tokens, stream.reason) == expected_tokens(PROMPT, max_tokens=50, seed=seed, min_tokens=minimum)


def test_a_ring_that_is_opened_again_has_no_parameters_from_before() -> None:
    machine = Machine(lanes=2, slots=1, log_entries=25)
    for lane in range(2):  # the second request to arrive has the second row
        machine.attach(lane).submit(record(PROMPT, max_tokens=3, seed=3), 0)
    run_until_idle(machine)
    machine.scheduler.start(epoch=18)
    machine.scheduler.set_state(schema.EngineState.READY)
    asked = record(PROMPT, max_tokens=14, seed=4)
    stream = served_beside_a_paused_lane(machine, asked, after=22, resume_after=4)
    assert stream.tokens == expected_tokens(PROMPT, max_tokens=14, seed=4)[0]


def test_the_context_limit_ends_with_length() -> None:
    machine = Machine(max_context=16)
    gateway = machine.attach()
    position = gateway.submit(record(PROMPT, max_tokens=100), 0)
    run_until_idle(machine)
    gateway.read()
    assert (gateway.stream(position).tokens, FinishReason.LENGTH) == expected_tokens(
        PROMPT, max_tokens=100, max_context=16
    )


def test_alternatives_come_before_their_token_and_logprobs_only_when_asked_for() -> None:
    machine = Machine()
    gateway = machine.attach()
    rich = gateway.submit(record(PROMPT, slot=0, top_logprobs=3, flags=DescriptorFlag.LOGPROBS), 0)
    plain = gateway.submit(record(PROMPT, slot=1), 1024)
    run_until_idle(machine)
    gateway.read()
    stream = gateway.stream(rich)
    assert stream.alternatives == [[token, token + 1, token + 2] for token in stream.tokens]
    assert stream.logprobs == [-float(token) for token in stream.tokens]
    assert gateway.stream(plain).logprobs == [0.0] * 4


def test_slot_status_follows_the_request() -> None:
    machine = Machine()
    gateway = machine.attach()
    position = gateway.submit(record(PROMPT, slot=5, max_tokens=2), 0)
    tag = schema.submission_tag(position)
    machine.poll()
    assert gateway.client.slot_statuses()[5] == schema.slot_status_word(tag, SlotPhase.WAITING, FinishReason.NONE)
    machine.plan()
    assert gateway.client.slot_statuses()[5] == schema.slot_status_word(tag, SlotPhase.RUNNING, FinishReason.NONE)
    machine.commit()
    run_until_idle(machine)
    assert gateway.client.slot_statuses()[5] == schema.slot_status_word(tag, SlotPhase.FREE, FinishReason.LENGTH)


def test_counters_and_lane_status_add_up() -> None:
    machine = Machine()
    gateway = machine.attach()
    gateway.submit(record(PROMPT, slot=0, max_tokens=3), 0)
    machine.poll()
    assert machine.lane_status()["waiting"] == 1
    machine.step()
    assert machine.lane_status()["running"] == 1
    assert machine.counters()["running"] == 1
    run_until_idle(machine)
    counters = machine.counters()
    assert counters["prompt_tokens"] == len(PROMPT)
    assert counters["generated_tokens"] == 3
    assert counters["finished"][FinishReason.LENGTH] == 1
    assert counters["kv_pages_free"] == counters["kv_pages_total"] == machine.config.page_count
    assert machine.lane_status()["generated_tokens"] == 3
    assert machine.lane_status()["log_backlog"] == 1 + 3 + 1
    gateway.read()
    machine.poll()
    assert machine.lane_status()["log_backlog"] == 0
    assert machine.status()["steps"] == 3


def test_positions_and_tags_wrap_around_32_bits() -> None:
    slots = 4
    machine = Machine(slots=slots, first_position=(1 << 32) - 2 * slots - 3)
    gateway = machine.attach()
    for turn in range(12):
        position = gateway.submit(record(PROMPT, slot=turn % slots, max_tokens=2, seed=turn), 1024 * (turn % slots))
        run_until_idle(machine)
        gateway.read()
        assert gateway.stream(position).tokens == expected_tokens(PROMPT, max_tokens=2, seed=turn)[0]
    assert position > 1 << 32


def test_heartbeat_grows_without_requests_and_between_layers() -> None:
    machine = Machine()
    before = int(machine.status()["heartbeat"])
    machine.poll()
    machine.scheduler.heartbeat()
    assert int(machine.status()["heartbeat"]) == before + 2
