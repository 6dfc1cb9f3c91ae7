"""Ends from outside: cancel, time limit, full queue, leases, new gateways, drain and stop; all also within a step."""

from __future__ import annotations

import numpy as np
import pytest

from services.ring.schema import Command, EngineState, FinishReason, LanePhase, RejectCode
from tests.gpu_engine.core.machine import Machine, expected_tokens, record

PROMPT = [4, 5, 6, 7, 8]
LONG = 50


def steps(machine: Machine, count: int) -> None:
    for _ in range(count):
        machine.step()


@pytest.mark.parametrize("state", ["waiting", "running", "in the step"])
def test_cancel_frees_everything_at_once(state: str) -> None:
    machine = Machine()
    gateway = machine.attach()
    position = gateway.submit(record(PROMPT, slot=2, max_tokens=LONG), 0)
    machine.poll()
    if state != "waiting":
        steps(machine, 3)
    if state == "in the step":
        machine.plan()
    gateway.client.cancel(2, position)
    machine.poll()
    if state == "in the step":
        assert machine.scheduler.running == 1
        machine.commit()
    machine.check_empty()
    gateway.read()
    assert gateway.stream(position).reason is FinishReason.CANCELLED
    assert len(gateway.stream(position).tokens) == (0 if state == "waiting" else 3)


def test_a_cancel_of_an_earlier_submission_does_nothing_to_the_slots_next() -> None:
    machine = Machine()
    gateway = machine.attach()
    first = gateway.submit(record(PROMPT, slot=2, max_tokens=1), 0)
    steps(machine, 3)
    gateway.read()
    second = gateway.submit(record(PROMPT, slot=2, max_tokens=3), 0)
    gateway.client.cancel(2, first)
    steps(machine, 5)
    gateway.read()
    assert gateway.stream(second).reason is FinishReason.LENGTH


@pytest.mark.parametrize("in_step", [False, True])
def test_the_time_limit_counts_from_submission(in_step: bool) -> None:
    machine = Machine()
    gateway = machine.attach()
    position = gateway.submit(record(PROMPT, max_tokens=LONG, time_limit_ms=2), 0)
    machine.poll()
    machine.tick(1_999)
    machine.poll()
    assert not machine.scheduler.idle
    if in_step:
        machine.plan()
    machine.tick(1)
    machine.poll()
    if in_step:
        machine.commit()
    gateway.read()
    assert gateway.stream(position).reason is FinishReason.TIME_LIMIT
    machine.check_empty()


def test_a_full_queue_answers_at_once() -> None:
    machine = Machine(max_waiting=2)
    gateway = machine.attach()
    positions = [gateway.submit(record(PROMPT, slot=slot), 1024 * slot) for slot in range(4)]
    machine.poll()
    gateway.read()
    assert [gateway.stream(p).reason for p in positions] == [None, None, *[FinishReason.QUEUE_FULL] * 2]


def test_a_lane_that_fills_the_queue_leaves_the_others_their_share() -> None:
    machine = Machine(lanes=2, max_waiting=4)
    greedy, modest = machine.attach(0), machine.attach(1)
    taken = [greedy.submit(record(PROMPT, slot=slot), 1024 * slot) for slot in range(6)]
    mine = [modest.submit(record(PROMPT, slot=slot), 1024 * slot) for slot in range(3)]
    machine.poll()
    greedy.read()
    modest.read()
    assert [greedy.stream(p).reason for p in taken] == [None] * 4 + [FinishReason.QUEUE_FULL] * 2
    assert [modest.stream(p).reason for p in mine] == [None, None, FinishReason.QUEUE_FULL]


@pytest.mark.parametrize("in_step", [False, True])
def test_a_lane_whose_lease_ran_out_is_reclaimed_alone(in_step: bool) -> None:
    machine = Machine(lanes=2, lease_us=1_200)
    dead, alive = machine.attach(0), machine.attach(1)
    dead.submit(record(PROMPT, slot=0, max_tokens=LONG), 0)
    dead.submit(record(PROMPT, slot=1, max_tokens=LONG), 1024)
    position = alive.submit(record(PROMPT, max_tokens=LONG), 0)
    steps(machine, 3)
    if in_step:
        machine.plan()
    machine.tick(800)
    alive.client.acknowledge(now=True)
    machine.poll()
    assert machine.lane_status(0)["phase"] == LanePhase.ATTACHED
    machine.tick(800)
    machine.poll()
    if in_step:
        machine.commit()
        machine.poll()
    assert machine.lane_status(0)["phase"] == LanePhase.FREE
    assert machine.lane_status(0)["running"] == machine.lane_status(0)["waiting"] == 0
    assert machine.lane_status(1)["phase"] == LanePhase.ATTACHED
    machine.poll()
    assert machine.lane_status(0)["phase"] == LanePhase.FREE, "its epoch was served already"
    while not machine.scheduler.idle:
        alive.client.acknowledge(now=True)
        machine.step()
    alive.read()
    assert alive.stream(position).tokens == expected_tokens(PROMPT, max_tokens=LONG)[0]
    machine.check_empty()


@pytest.mark.parametrize("in_step", [False, True])
def test_nothing_of_the_old_gateway_reaches_the_new_one(in_step: bool) -> None:
    machine = Machine(slots=4)
    old = machine.attach()
    for slot in range(3):
        old.submit(record(PROMPT, slot=slot, max_tokens=LONG), 1024 * slot)
    steps(machine, 3)
    if in_step:
        machine.plan()
    late = old.submit(record(PROMPT, slot=3, max_tokens=LONG), 3 * 1024)
    machine.epochs += 1
    new = type(old)(machine.region, machine.geometry, 0, machine.epochs)
    machine.poll()
    if in_step:
        assert not new.client.attached(), "the running step still has rows of the old one"
        machine.commit()
        machine.poll()
    assert new.client.attached()
    machine.check_empty()
    # What the old gateway still had under way when it died.
    old.client._write_flag(machine.geometry.doorbell(0, late), (late + 1) << 32)
    old.client._write_flag(machine.geometry.cancel(0, 0), late + 1)
    position = new.submit(record(PROMPT, slot=0, max_tokens=LONG), 0)
    steps(machine, LONG + 5)
    new.read()
    assert len(new.streams) == 1
    assert new.stream(position).tokens == expected_tokens(PROMPT, max_tokens=LONG)[0]
    assert machine.lane_status()["rejected"] == 0


def test_drain_finishes_what_was_submitted_and_refuses_what_is_new() -> None:
    machine = Machine()
    gateway = machine.attach()
    early = gateway.submit(record(PROMPT, slot=0, max_tokens=5), 0)
    machine.poll()
    machine.set_command(Command.DRAIN)
    late = gateway.submit(record(PROMPT, slot=1, max_tokens=5), 1024)
    steps(machine, 2)
    assert machine.status()["state"] == EngineState.DRAINING
    assert not machine.scheduler.drained
    steps(machine, 6)
    gateway.read()
    assert gateway.stream(early).tokens == expected_tokens(PROMPT, max_tokens=5)[0]
    assert (gateway.stream(late).reason, gateway.stream(late).code) == (FinishReason.SHUTDOWN, RejectCode.NONE)
    assert machine.scheduler.drained


def test_stop_ends_every_request_now() -> None:
    machine = Machine(max_running=2)
    gateway = machine.attach()
    positions = [gateway.submit(record(PROMPT, slot=slot, max_tokens=LONG), 1024 * slot) for slot in range(4)]
    steps(machine, 3)
    machine.plan()
    machine.set_command(Command.STOP)
    machine.poll()
    assert not machine.scheduler.drained
    machine.commit()
    assert machine.scheduler.drained
    gateway.read()
    assert {gateway.stream(p).reason for p in positions} == {FinishReason.SHUTDOWN}
    machine.check_empty()


def test_a_full_log_pauses_its_lane_alone_and_gives_up_its_pages() -> None:
    """The lane that is not read holds neither the pages nor the lines that another lane's requests need."""
    machine = Machine(lanes=2, slots=2, log_entries=29, page_count=16, max_running=2, priority_boost=0)
    deaf, honest = machine.attach(0), machine.attach(1)
    stuck = [deaf.submit(record(PROMPT, slot=slot, max_tokens=LONG, seed=slot), 1024 * slot) for slot in range(2)]
    steps(machine, 40)
    assert machine.lane_status(0)["log_backlog"] <= 29
    for turn in range(4):
        position = honest.submit(record(PROMPT, max_tokens=20, seed=turn), 0)
        steps(machine, 24)
        honest.read()
        assert honest.stream(position).tokens == expected_tokens(PROMPT, max_tokens=20, seed=turn)[0]
    while not machine.scheduler.idle:
        deaf.read()
        machine.step()
    deaf.read()
    for seed, position in enumerate(stuck):
        assert deaf.stream(position).tokens == expected_tokens(PROMPT, max_tokens=LONG, seed=seed)[0]
    machine.check_empty()


def test_calls_out_of_order_and_bad_results_are_refused() -> None:
    machine = Machine()
    empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
    with pytest.raises(RuntimeError, match="no step was planned"):
        machine.scheduler.commit(0, *empty)
    gateway = machine.attach()
    gateway.submit(record(PROMPT, top_logprobs=2), 0)
    machine.poll()
    assert machine.plan()
    with pytest.raises(RuntimeError, match="not committed"):
        machine.plan()
    with pytest.raises(ValueError, match="length of tokens is 0, must be 1 to 1"):
        machine.scheduler.commit(0, *empty)
    one = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="top_tokens must have shape"):
        machine.scheduler.commit(0, np.zeros(1, np.int32), one)
    tops = np.zeros((1, 20), np.int32), np.zeros((1, 20), np.float32)
    with pytest.raises(ValueError, match="sampled token is"):
        machine.scheduler.commit(0, np.full(1, -1, np.int32), one, *tops)
    machine.commit()
