"""A soak of the cuda engine: ``python -m bench.soak --seconds 600``, or ``make soak-gpu SECONDS=600``.

SmolLM2's geometry with random weights behind eight lanes. Requests come in bursts, of random lengths, priorities and
sampling settings, some hostile, some cancelled; gateways stop reading until their logs are full, fall silent, leave and
come back. KV pages are scarce, so requests wait and are preempted. Every log entry is checked against what its request
may get (bench/soak_requests.py); greedy repeats must be equal wherever their tokens are clear.

At the end everything is drained, and the scheduling core must hold nothing any more: no request, KV page, sequence
line, arena line or promised log entry. A process of its own samples the heartbeat's age all the time, which must stay
under 100 ms, and the engine's memory must not grow. Exits with 1 on a fault.

A long soak may be several runs, each drained and audited: ``--append FILE`` adds a line of JSON to FILE for each and
prints what all runs of this commit come to.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.engine_process import EngineProcess, EngineSpec, engine_process
from bench.machine import commit
from bench.soak_audit import Audited, append
from bench.soak_lane import SPAN, SoakLane
from bench.soak_requests import GENERATED, PROMPT, Asker, Repeats, SoakError, demand
from services.gpu_engine.engine import EngineLimits
from services.ring.header import RingStatus, read_status
from services.ring.memory import MemoryTransport
from services.ring.schema import Command, EngineState, RingGeometry
from services.ring.shm import ShmTransport

LANES, SLOTS, LEASE_SECONDS = 8, 32, 2.0
GEOMETRY = RingGeometry(lanes=LANES, slots_per_lane=SLOTS, arena_bytes=SLOTS * SPAN, log_entries=1024)
LIMITS = EngineLimits(
    context=PROMPT + GENERATED + 1,
    page_size=16,
    kv_pages=800,
    max_running=96,
    max_batched_tokens=512,
    max_waiting=48,
    lease_timeout_ms=int(LEASE_SECONDS * 1000),
)
HEARTBEAT_LIMIT = 0.1  # seconds
MEMORY_LIMIT = 32 << 20  # bytes that the engine's process may grow after its first tenth
DRAIN_SECONDS = 60.0


def watch_heartbeat(ring: Path, oldest: Synchronized[float], running: Synchronized[int]) -> None:
    """Keep the longest time, in seconds, for which the heartbeat was seen to stand still while the engine was READY.

    What this process sleeps through does not count: between two looks at the same beat it stood still, whoever looked.
    """
    transport = ShmTransport(ring)
    last, since = -1, 0.0
    while running.value:
        now, status = time.monotonic(), read_status(transport, GEOMETRY).engine
        if status["heartbeat"] != last or status["state"] != EngineState.READY:
            last, since = int(status["heartbeat"]), now
        oldest.value = max(oldest.value, now - since)
        time.sleep(0.0005)


@contextmanager
def heartbeat_watched(ring: Path) -> Iterator[Synchronized[float]]:
    context = multiprocessing.get_context("spawn")
    oldest, running = context.Value("d", 0.0), context.Value("i", 1)
    process = context.Process(target=watch_heartbeat, args=(ring, oldest, running))
    process.start()
    try:
        yield oldest
    finally:
        running.value = 0
        process.join(10)
        process.kill()


class Soak:
    """The load on one engine, and what was seen of it."""

    def __init__(self, engine: EngineProcess, spec: EngineSpec, seed: int) -> None:
        self.engine = engine
        self.repeats = Repeats()
        self.full = 0  # times that a lane's log was seen full to nine tenths
        self.most_running = self.most_waiting = 0
        self._status = MemoryTransport(engine.region)
        asker = Asker(seed, spec.config.vocabulary)
        self.lanes = [SoakLane(engine.region, GEOMETRY, lane, LEASE_SECONDS, asker) for lane in range(LANES)]

    @property
    def counts(self) -> collections.Counter[str]:
        return sum((lane.counts for lane in self.lanes), collections.Counter())

    def status(self) -> RingStatus:
        return read_status(self._status, GEOMETRY)

    def memory(self) -> int:
        """Bytes of the engine's process that are in memory."""
        pages = int(Path(f"/proc/{self.engine.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def load(self, seconds: float) -> None:
        """Raises SoakError."""
        end = time.monotonic() + seconds
        next_look = 0.0
        while (now := time.monotonic()) < end:
            self._turn(now, submitting=True)
            if now >= next_look:
                next_look = now + 0.1
                self._look()

    def finish(self) -> None:
        """Wait until every lane is attached and has nothing in flight. Raises SoakError."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while not all(lane.quiet for lane in self.lanes):
            now = time.monotonic()
            demand(now < deadline, "requests do not end", self.status())
            self._turn(now, submitting=False)

    def _turn(self, now: float, *, submitting: bool) -> None:
        for lane in self.lanes:
            lane.work(now, self.repeats, submitting=submitting)

    def _look(self) -> None:
        status = self.status()
        demand(int(status.engine["state"]) == EngineState.READY, "the engine is not READY", status.engine)
        demand(self.engine.process.poll() is None, "the engine has ended")
        self.full += int((status.lanes["log_backlog"] > 0.9 * GEOMETRY.log_entries).sum())
        self.most_running = max(self.most_running, int(status.counters["running"]))
        self.most_waiting = max(self.most_waiting, int(status.counters["waiting"]))


def check_ring(soak: Soak) -> None:
    """Nothing is in flight, and DRAIN is obeyed. Raises SoakError."""
    counters = soak.status().counters
    demand(counters["kv_pages_free"] == counters["kv_pages_total"], "KV pages leaked", counters)
    demand(counters["running"] == 0 and counters["waiting"] == 0, "requests leaked", counters)
    soak.engine.order(Command.DRAIN)
    deadline = time.monotonic() + DRAIN_SECONDS
    while int(soak.status().engine["state"]) != EngineState.DRAINING:
        demand(time.monotonic() < deadline, "the engine does not drain", soak.status().engine)
        time.sleep(0.001)


def check_core(audit: dict[str, int]) -> None:
    """Raises SoakError."""
    empty = {"live_requests": 0, "free_pages": LIMITS.kv_pages, "free_lines": LIMITS.max_running}
    empty |= {"held_arena_lines": 0, "promised_log_entries": 0}
    demand(audit == empty, "the scheduling core still holds something", audit, empty)


def table(rows: dict[str, object]) -> Table:
    found = Table("what", "seen")
    for name, value in rows.items():
        found.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    return found


def run(arguments: argparse.Namespace, audited: Audited) -> None:
    """Fills ``audited``, whatever happens. Raises SoakError."""
    spec = EngineSpec(arguments.model, arguments.scheduler, GEOMETRY, LIMITS)
    with engine_process(spec) as engine, heartbeat_watched(engine.folder / "ring") as oldest:
        soak = Soak(engine, spec, arguments.seed)
        began = time.monotonic()
        try:
            soak.load(arguments.seconds / 10)
            memory = soak.memory()
            soak.load(arguments.seconds * 9 / 10)
            grown = soak.memory() - memory
            soak.finish()
            check_ring(soak)
            engine.stop()
            check_core(engine.audit)
        finally:
            counts, counters = soak.counts, soak.status().counters
            audited.seconds = min(time.monotonic() - began, arguments.seconds)
            audited.requests, audited.tokens = counts["requests ended"], int(counters["generated_tokens"])
            audited.heartbeat = oldest.value
            rows: dict[str, object] = {
                "machine": engine.gpu,
                "scheduled by": arguments.scheduler,
                "seed": str(arguments.seed),
                "seconds": round(time.monotonic() - began),
                **dict(sorted(counts.items())),
                "generated by the engine": int(counters["generated_tokens"]),
                "preemptions": int(counters["preemptions"]),
                "most running / waiting": f"{soak.most_running} / {soak.most_waiting}",
                "looks at a full log": soak.full,
                "greedy repeats equal / at a tie": f"{soak.repeats.equal} / {soak.repeats.ties}",
                "oldest heartbeat, ms": f"{oldest.value * 1e3:.1f}",
            }
            Console(width=100).print(table(rows))
    print(f"the core after the end: {engine.audit}; the process grew by {grown / 2**20:.1f} MiB")
    demand(0 < oldest.value < HEARTBEAT_LIMIT, "the heartbeat was old, or nobody looked", oldest.value)
    demand(grown < MEMORY_LIMIT, "the engine's process has grown", grown)
    demand(arguments.seconds < 60 or min(soak.full, counters["preemptions"], soak.repeats.equal) > 0, "too mild", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--scheduler", choices=("gpu", "host"), default="gpu")
    parser.add_argument("--model", default="smollm2-135m", help="of bench/engine_process.py")
    parser.add_argument("--seed", type=int, default=time.time_ns() & 0xFFFF)
    parser.add_argument("--append", type=Path, help="file that collects what runs have come to")
    arguments, audited = parser.parse_args(), Audited(commit())
    try:
        run(arguments, audited)
    except BaseException as error:  # one that was broken off is not audited either
        audited.fault = str(error) or repr(error)
        if not isinstance(error, SoakError):
            raise
    finally:
        if arguments.append:
            print(append(arguments.append, audited))
    if audited.fault:
        sys.exit(f"FAULT: {audited.fault}")
    print("no fault")


if __name__ == "__main__":
    main()
