"""What the scheduling core costs: poll, plan and commit of a decode step, in the core alone and through the binding.

``python -m bench.scheduler``; one core, no model. Medians over many steps of requests that never end. "cold" walks
through memory larger than the caches before each call, as the model's step would. The second table is of requests that
come and go: what the prefix cache costs, and saves, in the core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from services.gpu_engine.core._core import Scheduler, SchedulerConfig
from services.ring import schema
from services.ring.header import RingInfo, format_ring
from services.ring.lane import LaneClient
from services.ring.memory import MemoryTransport, allocate_region
from services.ring.record import pack_record
from services.ring.schema import RingGeometry

STEPS, COLD_STEPS = 1000, 60
PROMPT, OUTPUT = 64, 2_000
RECORD = schema.record_bytes(PROMPT, OUTPUT)
PAGE_SIZE = 16
EVICTOR_BYTES = 64 << 20


@dataclass(frozen=True)
class Load:
    name: str
    rows: int  # sequences that decode
    waiting: int = 0  # requests that never get their turn
    lanes: int = 4
    slots: int = 64
    cold: bool = False
    prefix_cache: bool = False
    alike: bool = True  # the prompts


@dataclass(frozen=True)
class Cost:
    """Microseconds of one call: in the core, and as Python sees it."""

    core: float
    binding: float


LOADS = (
    Load("1 row", 1),
    Load("64 rows", 64),
    Load("256 rows", 256),
    Load("256 rows, prefix cache, never found", 256, prefix_cache=True, alike=False),
    Load("256 rows, prefix cache, found", 256, prefix_cache=True),
    Load("256 rows, 1 lane", 256, lanes=1, slots=256),
    Load("256 rows of 4,096 slots", 256, lanes=4, slots=1024),
    Load("16 rows of 4,096 slots", 16, lanes=4, slots=1024),
    Load("256 rows, 2,048 waiting", 256, waiting=2048, lanes=4, slots=1024),
    Load("256 rows, cold", 256, cold=True),
    Load("16 rows of 4,096 slots, cold", 16, lanes=4, slots=1024, cold=True),
)


class Engine:
    """A scheduler whose every lane is read and acknowledged, and whose executor answers at once."""

    def __init__(self, load: Load) -> None:
        self.load = load
        total = load.rows + load.waiting
        geometry = RingGeometry(load.lanes, load.slots, RECORD * -(-total // load.lanes), 1 << 16)
        region = allocate_region(geometry.ring_bytes)
        format_ring(region, RingInfo(geometry, bytes(32), 50_000, 4_096))
        config = SchedulerConfig(
            page_size=PAGE_SIZE,
            page_count=load.rows * -(-(PROMPT + OUTPUT) // PAGE_SIZE),
            max_running=load.rows,
            max_batched_tokens=2_048,
            max_waiting=4_096,
            prefix_cache=load.prefix_cache,
            eos_token_ids=[2],
        )
        self.scheduler = Scheduler(region, config)
        self.scheduler.start(1)
        self.lanes = [
            LaneClient(MemoryTransport(region), geometry, lane, gateway_epoch=lane + 1, lease_timeout=1e9)
            for lane in range(load.lanes)
        ]
        for lane in self.lanes:
            lane.begin_attach()
        self.scheduler.poll(0)
        assert all(lane.attached() for lane in self.lanes)
        prompt = np.arange(PROMPT, dtype=np.uint32)
        for i in range(total):
            prompt[0] = 0 if load.alike else i
            lane, slot = self.lanes[i % load.lanes], i // load.lanes
            lane.submit(pack_record(prompt, slot=slot, max_tokens=OUTPUT, flags=1), slot * RECORD)
        while self.scheduler.running + self.scheduler.waiting < total:
            self.scheduler.poll(0)
        self.tokens = np.full(load.rows, 7, np.int32)
        self.logprobs = np.zeros(load.rows, np.float32)
        self.evictor = np.ones(EVICTOR_BYTES, np.uint8)
        while not self.decoding():
            pass

    def decoding(self) -> bool:
        """Run a step; whether every row was past its prompt."""
        assert self.scheduler.plan(0)
        step = self.scheduler.step
        ready = step.tokens == step.rows == self.load.rows
        self.scheduler.commit(0, self.tokens[: step.samples], self.logprobs[: step.samples])
        return ready

    def acknowledge(self) -> None:
        for lane in self.lanes:
            lane.poll()
            lane.read_log()
            lane.acknowledge(now=True)

    def measure(self) -> dict[str, Cost]:
        core: dict[str, list[float]] = {"poll": [], "plan": [], "commit": []}
        binding: dict[str, list[float]] = {"poll": [], "plan": [], "commit": []}
        scheduler = self.scheduler
        for now in range(COLD_STEPS if self.load.cold else STEPS):
            self.acknowledge()
            calls: dict[str, Callable[[], object]] = {
                "poll": partial(scheduler.poll, now),
                "plan": partial(scheduler.plan, now),
                "commit": partial(scheduler.commit, now, self.tokens, self.logprobs),
            }
            for name, call in calls.items():
                if self.load.cold:
                    self.evictor.max()  # reads only, so that no write-back is under way
                begin = time.perf_counter_ns()
                call()
                binding[name].append((time.perf_counter_ns() - begin) / 1e3)
                core[name].append(scheduler.call_ns / 1e3)
        return {name: Cost(statistics.median(core[name]), statistics.median(binding[name])) for name in core}


class Turnover:
    """Requests of one long prompt each, one after the other, in a cache that is full of earlier ones' pages."""

    PAGES = 4_096
    OUTPUT = 2

    def __init__(self, prompt_tokens: int, *, prefix_cache: bool, alike: bool) -> None:
        self._prompt = np.arange(prompt_tokens, dtype=np.uint32) % 50_000
        self._alike = alike
        size = schema.record_bytes(prompt_tokens, self.OUTPUT)
        geometry = RingGeometry(1, 8, size, 1 << 16)
        region = allocate_region(geometry.ring_bytes)
        format_ring(region, RingInfo(geometry, bytes(32), 50_000, prompt_tokens + self.OUTPUT))
        config = SchedulerConfig(
            page_size=PAGE_SIZE,
            page_count=self.PAGES,
            max_running=256,
            max_batched_tokens=2_048,
            prefix_cache=prefix_cache,
        )
        self._scheduler = Scheduler(region, config)
        self._scheduler.start(1)
        self._lane = LaneClient(MemoryTransport(region), geometry, 0, gateway_epoch=1, lease_timeout=1e9)
        self._lane.begin_attach()
        self._scheduler.poll(0)
        assert self._lane.attached()
        self._sent = 0

    def one(self) -> float:
        """Microseconds of all calls from submission to end."""
        if not self._alike:
            self._prompt[0] = self._sent
        self._lane.submit(pack_record(self._prompt, slot=self._sent % 8, max_tokens=self.OUTPUT), 0)
        self._sent += 1
        scheduler = self._scheduler
        scheduler.poll(0)
        spent = scheduler.call_ns
        while scheduler.plan(0):
            spent += scheduler.call_ns
            samples = scheduler.step.samples
            scheduler.commit(0, np.zeros(samples, np.int32), np.zeros(samples, np.float32))
            spent += scheduler.call_ns
        self._lane.poll()
        self._lane.read_log()
        self._lane.acknowledge(now=True)
        return spent / 1e3

    def measure(self, prompt_tokens: int) -> float:
        for _ in range(2 * self.PAGES * PAGE_SIZE // prompt_tokens):
            self.one()  # until nothing but earlier requests' pages is left
        return statistics.median(self.one() for _ in range(300))


def turnover() -> Table:
    table = Table(title="One request from submission to end, median µs in the core (ratio to no prefix cache)")
    for column in ("prompt", "no prefix cache", "never found", "found"):
        table.add_column(column, justify="right")
    for tokens in (64, 512, 2_048, 16_384):
        off, miss, hit = (
            Turnover(tokens, prefix_cache=on, alike=alike).measure(tokens)
            for on, alike in ((False, True), (True, False), (True, True))
        )
        table.add_row(f"{tokens:,}", f"{off:.1f}", f"{miss:.1f} ({miss / off:.2f})", f"{hit:.1f} ({hit / off:.2f})")
    return table


def main() -> None:
    table = Table(title="Scheduling core, median µs a step: core alone (with binding)")
    for column in ("load", "poll", "plan", "commit", "plan + commit", "ns a row"):
        table.add_column(column, justify="left" if column == "load" else "right")
    for load in LOADS:
        costs = Engine(load).measure()
        core = costs["plan"].core + costs["commit"].core
        binding = costs["plan"].binding + costs["commit"].binding
        cells = [f"{cost.core:.1f} ({cost.binding:.1f})" for cost in costs.values()]
        table.add_row(load.name, *cells, f"{core:.1f} ({binding:.1f})", f"{1e3 * core / load.rows:.0f}")
    Console().print(table)
    Console().print(turnover())


if __name__ == "__main__":
    main()
