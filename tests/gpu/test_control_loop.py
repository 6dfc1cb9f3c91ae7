"""Both control loops serve a ring with a GPU as the scheduling core does on the CPU: same tokens, same ends."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda engine's libraries are not installed: pip install 'blink[cuda]'")

from services.gpu_engine.cuda.assemble import SchedulerPlace
from services.gpu_engine.cuda.step_loop import CoreAudit
from services.ring import _atomics, schema
from services.ring.header import RingStatus, read_ring_info
from services.ring.memory import MemoryTransport
from services.ring.schema import Command, DescriptorFlag, EngineState, FinishReason, RejectCode
from tests.gpu.serving import COMMAND, PATIENCE, finish, serving, until
from tests.gpu_engine.core.machine import EOS, Gateway, expected_tokens, record

pytestmark = pytest.mark.usefixtures("device")  # which skips where there is no GPU

PROMPT = [5, 9, 200, 41, 7]
ROOT = Path(__file__).parents[2]
SPAN = 1024  # arena bytes of a slot


@pytest.mark.parametrize("budget", [1, 3, 16])
def test_chunks_of_any_size_give_the_same_tokens(budget: int, scheduler: SchedulerPlace) -> None:
    with serving(scheduler=scheduler, max_batched_tokens=budget) as engine:
        gateway = engine.attach()
        position = gateway.submit(record(PROMPT, max_tokens=20, seed=8), 0)
        finish(gateway)
        stream = gateway.stream(position)
        assert (stream.tokens, stream.reason) == expected_tokens(PROMPT, max_tokens=20, seed=8)
        engine.stop()
        assert engine.step.faults() == 0


def has_tokens(gateway: Gateway, position: int) -> bool:
    gateway.read()
    return bool(gateway.stream(position).tokens)


class Load:
    """Random requests of one gateway, each slot used again as soon as it is free."""

    def __init__(self, gateway: Gateway, slots: int, requests: int, seed: int, context: int = 64) -> None:
        self.random = random.Random(seed)
        self.gateway, self.left, self.context = gateway, requests, context
        self.free = list(range(slots))
        self.live: dict[int, int] = {}  # position -> slot
        self.asked: dict[int, tuple[list[int], int, int, int]] = {}

    def work(self) -> bool:
        """Submit and read; whether anything is left."""
        while self.free and self.left:
            pick = self.random
            prompt = [pick.randrange(211) for _ in range(pick.randint(1, self.context // 2))]
            most, seed = pick.randint(1, self.context // 2), pick.randrange(1 << 32)
            least = pick.randint(0, most) if pick.random() < 0.2 else 0
            slot = self.free.pop()
            packed = record(
                prompt, slot=slot, max_tokens=most, min_tokens=least, seed=seed, priority=pick.randint(-2, 2)
            )
            position = self.gateway.submit(packed, slot * SPAN)
            self.live[position], self.asked[position] = slot, (prompt, most, least, seed)
            self.left -= 1
        self.gateway.read()
        for position in [p for p in self.live if self.gateway.stream(p).reason is not None]:
            self.free.append(self.live.pop(position))
        return bool(self.left or self.live)

    def check(self) -> None:
        for position, (prompt, most, least, seed) in self.asked.items():
            stream = self.gateway.stream(position)
            expected = expected_tokens(prompt, max_tokens=most, min_tokens=least, seed=seed, max_context=self.context)
            assert (stream.tokens, stream.reason) == expected


@pytest.mark.parametrize(("scheduler", "threads"), [("gpu", 256), ("gpu", 512), ("host", 256)])
@pytest.mark.parametrize(
    "settings",
    [
        {"lanes": 2},
        {"lanes": 3, "page_count": 17},  # one sequence of 64 tokens fits: preemption all the time
        {"lanes": 2, "first_position": (1 << 32) - 40},  # submission tags wrap
    ],
    ids=["plenty", "few pages", "wrap"],
)
def test_random_load_gives_every_request_its_tokens(
    settings: dict[str, Any], scheduler: SchedulerPlace, threads: int
) -> None:
    with serving(scheduler=scheduler, threads=threads, **settings) as engine:
        loads = [Load(engine.attach(lane), 8, 150, seed=lane) for lane in range(settings["lanes"])]
        until(lambda: sum(load.work() for load in loads) == 0)
        counters = engine.status().counters
        engine.stop()
        for load in loads:
            load.check()
        assert engine.step.faults() == 0
        assert counters["kv_pages_free"] == counters["kv_pages_total"]
        pages = settings.get("page_count", 64)
        assert engine.loop.audit() == CoreAudit(0, pages, 8, held_arena_lines=0, promised_log_entries=0)
        assert counters["generated_tokens"] == sum(
            len(stream.tokens) for load in loads for stream in load.gateway.streams.values()
        )
        assert counters["preemptions"] > 100 or "page_count" not in settings
        steps = int(engine.status().engine["steps"])
        assert steps > 500
        if scheduler == "gpu":
            assert engine.gpu_loop.executions > steps // 120  # it launched itself again and again


@pytest.mark.parametrize("launch_limit", [1, 7, 120])
def test_the_loop_launches_itself_again_and_again(launch_limit: int) -> None:
    with serving(launch_limit=launch_limit, max_context=4096, arena_bytes=1 << 17, page_count=1024) as engine:
        gateway = engine.attach()
        flags = DescriptorFlag.IGNORE_EOS
        position = gateway.submit(record(PROMPT, max_tokens=2_500, flags=flags), 0)
        finish(gateway)
        steps = int(engine.status().engine["steps"])
        engine.stop()
        assert (
            gateway.stream(position).tokens
            == expected_tokens(PROMPT, max_tokens=2_500, ends=frozenset(), max_context=4096)[0]
        )
        assert steps == 2_500
        assert engine.gpu_loop.executions == -(-steps // launch_limit) + (steps % launch_limit == 0)


def test_two_hundred_rows_and_log_entries_with_alternatives(scheduler: SchedulerPlace) -> None:
    """More rows than warps, several lanes in one warp, entries of different widths in one lane."""
    lanes, slots = 4, 64
    sizes: dict[str, Any] = {"arena_bytes": slots * SPAN, "log_entries": 8192, "page_count": 8192, "max_running": 256}
    with serving(
        scheduler=scheduler, lanes=lanes, slots=slots, max_batched_tokens=300, buckets=(8, 64, 256, 300), **sizes
    ) as engine:
        gateways = [engine.attach(lane) for lane in range(lanes)]
        asked = {}
        for slot in range(slots):
            for lane, gateway in enumerate(gateways):
                prompt, seed, width = [slot, lane, 7], slot * lanes + lane, (slot + lane) % 4
                packed = record(
                    prompt,
                    slot=slot,
                    max_tokens=24,
                    seed=seed,
                    top_logprobs=width,
                    flags=DescriptorFlag.LOGPROBS | DescriptorFlag.IGNORE_EOS,
                )
                asked[lane, gateway.submit(packed, slot * SPAN)] = (prompt, seed, width)
        finish(*gateways)
        engine.stop()
        for (lane, position), (prompt, seed, width) in asked.items():
            stream = gateways[lane].stream(position)
            tokens, reason = expected_tokens(prompt, max_tokens=24, seed=seed, ends=frozenset())
            assert (stream.tokens, stream.reason) == (tokens, reason)
            assert stream.logprobs == [-float(token) for token in tokens]
            assert stream.alternatives == [[(token + i) % 211 for i in range(width)] for token in tokens]
        assert engine.step.faults() == 0


def test_cancel_time_limit_and_stop_token_end_requests_while_steps_run(scheduler: SchedulerPlace) -> None:
    with serving(
        scheduler=scheduler,
        make_record=lambda step: step.delayed(300),
        max_context=4096,
        arena_bytes=1 << 17,
        page_count=4096,
    ) as engine:
        gateway = engine.attach()
        endless: dict[str, Any] = {"max_tokens": 3_000, "flags": DescriptorFlag.IGNORE_EOS}
        cancelled = gateway.submit(record(PROMPT, slot=0, **endless), 0)
        limited = gateway.submit(record(PROMPT, slot=1, time_limit_ms=30, **endless), 1 << 15)
        until(lambda: has_tokens(gateway, cancelled))
        gateway.client.cancel(0, cancelled)
        finish(gateway)
        assert gateway.stream(cancelled).reason is FinishReason.CANCELLED
        assert gateway.stream(limited).reason is FinishReason.TIME_LIMIT
        for position in (cancelled, limited):
            tokens = gateway.stream(position).tokens
            assert 0 < len(tokens) < 1_000
            assert tokens == expected_tokens(PROMPT, max_tokens=len(tokens), ends=frozenset(), max_context=4096)[0]


def test_hostile_descriptors_are_refused_and_harm_nobody(scheduler: SchedulerPlace) -> None:
    with serving(scheduler=scheduler) as engine:
        gateway = engine.attach()
        good = gateway.submit(record(PROMPT, slot=0, max_tokens=20, seed=3), 0)
        bad = {
            RejectCode.BAD_SLOT: gateway.submit(record(PROMPT, slot=1 << 31), SPAN),
            RejectCode.EMPTY_PROMPT: gateway.submit(record([], slot=1), 2 * SPAN),
            RejectCode.BAD_TOKEN_ID: gateway.submit(record([5, 211], slot=1), 3 * SPAN),
            RejectCode.BAD_TOKEN_BUDGET: gateway.submit(record(PROMPT, slot=1, max_tokens=0), 4 * SPAN),
            RejectCode.BAD_SAMPLING: gateway.submit(record(PROMPT, slot=1, temperature=float("nan")), 5 * SPAN),
            RejectCode.PROMPT_TOO_LONG: gateway.submit(record([1] * 64, slot=1), 6 * SPAN),
            RejectCode.BAD_RECORD: gateway.submit(record(PROMPT, slot=1, max_tokens=59), (1 << 14) - 256),
        }
        finish(gateway)
        stream = gateway.stream(good)
        assert (stream.tokens, stream.reason) == expected_tokens(PROMPT, max_tokens=20, seed=3)
        for code, position in bad.items():
            assert gateway.stream(position).code is code


def test_a_lane_whose_log_is_full_waits_alone(scheduler: SchedulerPlace) -> None:
    with serving(scheduler=scheduler, lanes=2, slots=4, log_entries=40) as engine:
        silent, reading = engine.attach(0), engine.attach(1)
        flags = DescriptorFlag.IGNORE_EOS
        asked = [silent.submit(record(PROMPT, slot=slot, max_tokens=40, flags=flags), slot * SPAN) for slot in range(4)]
        load = Load(reading, 4, 100, seed=1)
        until(lambda: not load.work())
        load.check()
        assert int(engine.status().lanes[0]["log_backlog"]) <= 40
        finish(silent)
        for position in asked:
            expected = expected_tokens(PROMPT, max_tokens=40, ends=frozenset())
            assert (silent.stream(position).tokens, silent.stream(position).reason) == expected


def test_a_lane_whose_lease_runs_out_is_served_to_the_next_gateway(scheduler: SchedulerPlace) -> None:
    with serving(scheduler=scheduler, lease_us=20_000, make_record=lambda step: step.delayed(200)) as engine:
        lost = engine.attach()
        lost.submit(record(PROMPT, max_tokens=50, flags=DescriptorFlag.IGNORE_EOS), 0)
        until(lambda: int(engine.status().lanes[0]["phase"]) == schema.LanePhase.FREE)
        until(lambda: int(engine.status().counters["kv_pages_free"]) == 64)
        gateway = engine.attach()
        position = gateway.submit(record(PROMPT, max_tokens=5), 0)
        finish(gateway)
        assert gateway.stream(position).tokens == expected_tokens(PROMPT, max_tokens=5)[0]


def test_drain_finishes_what_was_submitted_and_stop_ends_the_loop(scheduler: SchedulerPlace) -> None:
    with serving(scheduler=scheduler, make_record=lambda step: step.delayed(200)) as engine:
        gateway = engine.attach()
        running = gateway.submit(record(PROMPT, slot=0, max_tokens=40, flags=DescriptorFlag.IGNORE_EOS), 0)
        until(lambda: has_tokens(gateway, running))
        engine.order(Command.DRAIN)
        until(lambda: int(engine.status().engine["state"]) == EngineState.DRAINING)
        late = gateway.submit(record(PROMPT, slot=1), SPAN)
        finish(gateway)
        assert gateway.stream(running).reason is FinishReason.LENGTH
        assert gateway.stream(late).reason is FinishReason.SHUTDOWN


def test_stop_ends_requests_with_shutdown(scheduler: SchedulerPlace) -> None:
    with serving(scheduler=scheduler, make_record=lambda step: step.delayed(200)) as engine:
        gateway = engine.attach()
        running = gateway.submit(record(PROMPT, max_tokens=50, flags=DescriptorFlag.IGNORE_EOS), 0)
        until(lambda: has_tokens(gateway, running))
        engine.stop()
        gateway.read()
        assert gateway.stream(running).reason is FinishReason.SHUTDOWN


def test_the_heartbeat_moves_idle_and_while_a_long_step_runs(scheduler: SchedulerPlace) -> None:
    with serving(scheduler=scheduler, make_record=lambda step: step.delayed(100_000)) as engine:
        gateway = engine.attach()
        assert _longest_gap(engine.status, 0.1) < 0.05
        gateway.submit(record(PROMPT, max_tokens=4), 0)
        until(lambda: int(engine.status().counters["running"]) == 1)
        assert _longest_gap(engine.status, 0.25) < 0.05
        finish(gateway)


def _longest_gap(status: Callable[[], RingStatus], seconds: float) -> float:
    """The longest time that the heartbeat stood still."""
    last, changed, longest, end = -1, time.monotonic(), 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        beat = int(status().engine["heartbeat"])
        now = time.monotonic()
        if beat != last:
            last, changed = beat, now
        longest = max(longest, now - changed)
    return longest


def test_the_parked_host_uses_no_cpu_time_under_load() -> None:
    command = [sys.executable, "-m", "tests.gpu.parked_engine"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        region = np.frombuffer(np.memmap(path, np.uint8, "r+"), np.uint8)
        gateway = Gateway(region, read_ring_info(MemoryTransport(region)).geometry, 0, 1)
        until(gateway.client.attached)
        load = Load(gateway, 8, 1 << 30, seed=1)
        begin, before = time.monotonic(), _cpu_milliseconds(process.pid)
        while time.monotonic() - begin < 20.0:
            load.work()
        used = _cpu_milliseconds(process.pid)
        _atomics.store_release(region, COMMAND, Command.STOP)
        assert process.wait(PATIENCE) == 0
    assert len(gateway.streams) > 100
    spent = {name: milliseconds - before.get(name, 0.0) for name, milliseconds in used.items()}
    assert sum(spent.values()) < 10.0, f"ms of CPU time in 20 s by thread: {spent}"


def _cpu_milliseconds(pid: int) -> dict[str, float]:
    """CPU time of each thread of a process."""
    return {
        f"{task.name} {(task / 'comm').read_text().strip()}": int((task / "schedstat").read_text().split()[0]) / 1e6
        for task in Path(f"/proc/{pid}/task").iterdir()
    }


def test_eos_is_sampled_and_ends(scheduler: SchedulerPlace) -> None:
    """The stand-in's end token must come up, or the other tests prove less than they say."""
    seeds = [seed for seed in range(3_000) if expected_tokens(PROMPT, max_tokens=8, seed=seed)[1] is FinishReason.STOP]
    with serving(scheduler=scheduler) as engine:
        gateway = engine.attach()
        positions = [
            gateway.submit(record(PROMPT, slot=i, max_tokens=8, seed=seed), i * SPAN)
            for i, seed in enumerate(seeds[:8])
        ]
        finish(gateway)
        for position in positions:
            assert gateway.stream(position).reason is FinishReason.STOP
            assert gateway.stream(position).tokens[-1] == EOS
