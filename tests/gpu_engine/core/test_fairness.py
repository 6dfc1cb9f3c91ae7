"""Who goes first: priority, arrival, fair lanes, bounded overtaking, preemption, and progress whatever the pool."""

from __future__ import annotations

import numpy as np
import pytest

from services.ring.schema import FinishReason
from tests.gpu_engine.core.machine import Gateway, Machine, expected_tokens, record

PROMPT = [4, 5, 6, 7, 8]
SPAN = 512


def submit(gateway: Gateway, slot: int, *, max_tokens: int = 3, prompt: list[int] | None = None, **fields: int) -> int:
    return gateway.submit(record(prompt or PROMPT, slot=slot, max_tokens=max_tokens, **fields), SPAN * slot)


def finishing_order(machine: Machine, gateways: list[Gateway], limit: int = 2000) -> list[tuple[int, int]]:
    """(lane, position) as they end; all are read after each step."""
    order: list[tuple[int, int]] = []
    for _ in range(limit):
        machine.step()
        for lane, gateway in enumerate(gateways):
            gateway.read()
            ended = [tag - 1 for tag, s in gateway.streams.items() if s.reason and (lane, tag - 1) not in order]
            order += [(lane, position) for position in ended]
        if machine.scheduler.idle:
            return order
    raise AssertionError("no end in sight")


def test_one_lane_and_priority_is_first_in_first_out() -> None:
    machine = Machine(max_running=1)
    gateway = machine.attach()
    positions = [submit(gateway, slot) for slot in (5, 1, 7, 0)]
    assert finishing_order(machine, [gateway]) == [(0, p) for p in positions]


def test_backlogged_lanes_alternate() -> None:
    machine = Machine(lanes=2, max_running=1)
    greedy, modest = machine.attach(0), machine.attach(1)
    for slot in range(6):
        submit(greedy, slot)
    machine.step()
    for slot in range(2):
        submit(modest, slot)
    lanes = [lane for lane, _ in finishing_order(machine, [greedy, modest])]
    assert lanes == [0, 1, 0, 1, 0, 0, 0, 0]


def test_a_higher_priority_goes_first_and_displaces_the_last_running_one() -> None:
    machine = Machine(max_running=2, priority_boost=4)
    gateway = machine.attach()
    first = submit(gateway, 0, max_tokens=20)
    second = submit(gateway, 1, max_tokens=20)
    machine.step()
    machine.step()
    urgent = submit(gateway, 2, max_tokens=3, priority=4)
    order = [position for _, position in finishing_order(machine, [gateway])]
    assert order == [urgent, first, second]
    assert machine.counters()["preemptions"] == 1
    for position, length in ((first, 20), (second, 20), (urgent, 3)):
        assert gateway.stream(position).tokens == expected_tokens(PROMPT, max_tokens=length)[0]


def test_equal_priority_displaces_nobody() -> None:
    machine = Machine(max_running=1)
    gateway = machine.attach()
    submit(gateway, 0, priority=2, max_tokens=10)
    machine.step()
    submit(gateway, 1, priority=2)
    finishing_order(machine, [gateway])
    assert machine.counters()["preemptions"] == 0


@pytest.mark.parametrize("boost", [0, 1, 4])
def test_a_low_priority_request_is_overtaken_by_a_bounded_number(boost: int) -> None:
    """Under an endless stream of urgent requests the patient one waits for at most 8 * boost rounds of theirs."""
    machine = Machine(lanes=2, max_running=1, priority_boost=boost, log_entries=1024)
    patient, urgent = machine.attach(0), machine.attach(1)
    submit(urgent, 0, priority=4)
    machine.step()
    waiting = submit(patient, 0, max_tokens=1, priority=-4)
    overtaken, slot = 0, 1
    while patient.stream(waiting).reason is None:
        position = submit(urgent, slot, max_tokens=1, priority=4)
        slot = (slot + 1) % 8
        while urgent.stream(position).reason is None and patient.stream(waiting).reason is None:
            machine.step()
            urgent.read()
            patient.read()
        overtaken += 1
        assert overtaken <= 8 * boost + 2
    assert overtaken >= 8 * boost - 2, "priorities must count"


def test_an_idle_lane_saves_nothing_up() -> None:
    """A lane that was quiet for long does not get the engine for itself once it wakes."""
    machine = Machine(lanes=2, max_running=1)
    busy, late = machine.attach(0), machine.attach(1)
    for turn in range(30):
        submit(busy, turn % 8, max_tokens=1)
        machine.step()
        machine.step()
        busy.read()
    for slot in range(4):
        submit(busy, slot)
        submit(late, slot)
    lanes = [lane for lane, _ in finishing_order(machine, [busy, late])][-8:]
    assert lanes in ([0, 1] * 4, [1, 0] * 4)


@pytest.mark.parametrize("page_count", [6, 7, 9, 16])
@pytest.mark.parametrize("threads", [1, 3])
def test_tiny_page_pools_make_progress_and_lose_no_token(page_count: int, threads: int) -> None:
    machine = Machine(
        lanes=2, page_count=page_count, page_size=4, max_context=24, max_batched_tokens=7, threads=threads
    )
    gateways = [machine.attach(lane) for lane in range(2)]
    slots = 8 if threads == 1 else 3
    wanted = {}
    for lane, gateway in enumerate(gateways):
        for slot in range(slots):
            position = submit(gateway, slot, max_tokens=6 + slot, seed=10 * lane + slot)
            wanted[lane, position] = expected_tokens(PROMPT, max_tokens=6 + slot, seed=10 * lane + slot, max_context=24)
    finishing_order(machine, gateways)
    for (lane, position), expected in wanted.items():
        stream = gateways[lane].stream(position)
        assert (stream.tokens, stream.reason) == expected
    if page_count < 9:
        assert machine.counters()["preemptions"] > 0
    assert machine.counters()["prompt_tokens"] == 2 * slots * len(PROMPT), "recomputed tokens are not counted twice"
    machine.check_empty()


def test_every_interleaving_gives_each_request_the_same_tokens() -> None:
    """Random lanes, chunk sizes, pool sizes, polls within steps; a request's stream depends on none of them."""
    noise = np.random.default_rng(5)
    requests = [
        (noise.integers(0, 200, int(noise.integers(1, 20))).tolist(), int(noise.integers(1, 20))) for _ in range(8)
    ]
    expected = [expected_tokens(prompt, max_tokens=length, seed=i) for i, (prompt, length) in enumerate(requests)]
    for _ in range(25):
        machine = Machine(
            lanes=3,
            page_count=int(noise.integers(16, 40)),
            max_running=int(noise.integers(1, 9)),
            max_batched_tokens=int(noise.integers(1, 40)),
        )
        gateways = [machine.attach(lane) for lane in range(3)]
        placed = []
        for i in noise.permutation(len(requests)):
            gateway = gateways[int(noise.integers(3))]
            prompt, length = requests[i]
            placed.append(
                (gateway, submit(gateway, int(i), prompt=prompt, max_tokens=length, seed=int(i)), expected[i])
            )
            for _ in range(int(noise.integers(3))):
                machine.step()
        while not machine.scheduler.idle:
            machine.poll()
            if machine.plan():
                machine.poll()
                machine.commit()
        for gateway, position, (tokens, reason) in placed:
            gateway.read()
            assert gateway.stream(position).tokens == tokens
            assert gateway.stream(position).reason is reason
        machine.check_empty()


def test_prefill_chunks_share_the_step_with_decode_rows_under_the_budget() -> None:
    machine = Machine(max_batched_tokens=8)
    gateway = machine.attach()
    submit(gateway, 0, max_tokens=30)
    machine.step()
    submit(gateway, 1, prompt=[9] * 18, max_tokens=2)
    machine.poll()
    sizes = []
    for _ in range(3):
        machine.plan()
        step = machine.scheduler.step
        sizes.append(np.diff(step.row_start).tolist())
        machine.commit()
    assert sizes == [[1, 7], [1, 7], [1, 4]]


def test_a_thousand_requests_end_with_a_status_and_leave_nothing() -> None:
    noise = np.random.default_rng(11)
    machine = Machine(lanes=4, slots=16, arena_bytes=16 * SPAN, log_entries=512, page_count=48, max_running=16)
    gateways = [machine.attach(lane) for lane in range(4)]
    busy: list[dict[int, int]] = [{} for _ in gateways]  # slot -> position
    ended, sent = 0, 0
    while ended < 1000:
        for gateway, slots in zip(gateways, busy, strict=True):
            gateway.read()
            for slot, position in list(slots.items()):
                if gateway.stream(position).reason is not None:
                    del slots[slot]
                    ended += 1
                elif noise.integers(60) == 0:
                    gateway.client.cancel(slot, position)
            free = [slot for slot in range(16) if slot not in slots]
            for slot in free[: int(noise.integers(4))]:
                if sent < 1000:
                    length, seed = int(noise.integers(1, 24)), int(noise.integers(1 << 20))
                    prompt = noise.integers(0, 200, int(noise.integers(1, 24))).tolist()
                    slots[slot] = submit(gateway, slot, prompt=prompt, max_tokens=length, seed=seed)
                    sent += 1
        machine.step()
    reasons = {s.reason for g in gateways for s in g.streams.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED}
    machine.check_empty()
