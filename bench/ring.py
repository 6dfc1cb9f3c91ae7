"""What the shm ring costs: operations, a request's round trip, and tokens through a lane. ``python -m bench.ring``.

The engine's side is the stand-in engine in a process of its own, so the round trip crosses processes.
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from services.ring.header import read_ring_info
from services.ring.lane import LaneClient
from services.ring.record import pack_record
from services.ring.schema import LogKind
from services.ring.shm import ShmTransport

CALLS = 50_000
ROUND_TRIPS = 2_000
STREAMED_TOKENS = 2_000_000
ARENA_SPAN = 1 << 16
LANE_ARENA = 256 * ARENA_SPAN


@contextmanager
def stand_in_engine() -> Iterator[Path]:
    path = Path("/dev/shm") / f"blink-bench-{uuid.uuid4().hex}"
    command = [sys.executable, "-m", "tests.support.stand_in_engine", str(path), "--lanes", "1"]
    command += ["--arena-bytes", str(LANE_ARENA), "--idle-sleep", "0", "--burst", "32"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield path
        finally:
            process.terminate()


def microseconds(call: Callable[[], object], calls: int = CALLS) -> float:
    """Median over five rounds of the mean time of one call."""
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls // 5):
            call()
        rounds.append((time.perf_counter() - start) / (calls // 5))
    return float(np.median(rounds)) * 1e6


def calls_table(transport: ShmTransport, lane: LaneClient) -> Table:
    prompt = np.arange(131_072, dtype=np.uint32)
    ids = prompt.tolist()
    scratch = lane.geometry.arena(lane.lane)
    word, page = bytes(8), bytes(1 << 20)
    table = Table("call", "µs", "per second", title="One call")
    for name, call, calls in (
        ("write a flag", lambda: transport.write(scratch, word, flag=True), CALLS),
        ("read a line", lambda: transport.read(scratch, 64), CALLS),
        ("write 1 MiB", lambda: transport.write(scratch, page), 500),
        ("read 1 MiB", lambda: transport.read(scratch, 1 << 20), 500),
        ("LaneClient.poll", lane.poll, CALLS),
        ("LaneClient.acknowledge, due", lambda: lane.acknowledge(now=True), CALLS),
        ("LaneClient.acknowledge, not due", lane.acknowledge, CALLS),
        ("pack_record, 100 ids in a list", lambda: pack_record(ids[:100], slot=0, max_tokens=9), CALLS),
        ("pack_record, 131,072 ids in a list", lambda: pack_record(ids, slot=0, max_tokens=9), 100),
        ("pack_record, 131,072 ids in an array", lambda: pack_record(prompt, slot=0, max_tokens=9), 500),
    ):
        cost = microseconds(call, calls)
        table.add_row(name, f"{cost:.2f}", f"{1e6 / cost:,.0f}")
    return table


def round_trip_table(lane: LaneClient) -> Table:
    """submit → the engine's poll → ADMITTED, token and FINISH read. Both processes poll."""
    record = pack_record([1, 2, 3], slot=0, max_tokens=1)
    times = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        lane.submit(record, 0)
        finished = False
        while not finished:
            lane.poll()
            finished = bool((lane.read_log()["kind"] == LogKind.FINISH).any())
        times.append((time.perf_counter() - start) * 1e6)
        lane.acknowledge()
    table = Table("p50", "p90", "p99", title="Submit to FINISH, µs")
    table.add_row(*(f"{value:.0f}" for value in np.percentile(times, [50, 90, 99])))
    return table


def stream_table(transport: ShmTransport, lane: LaneClient) -> Table:
    table = Table(
        "streams", "tokens/s", "reads per 1,000 tokens", "writes per 1,000 tokens", title="Tokens through a lane"
    )
    for streams in (1, 32, 256):
        each = min(STREAMED_TOKENS // 10 // streams, ARENA_SPAN // 4 - 64)
        for slot in range(streams):
            lane.submit(pack_record([1, 2, 3], slot=slot, max_tokens=each), slot * ARENA_SPAN)
        reads, writes = transport.counters.reads, transport.counters.writes
        start = time.perf_counter()
        finished = tokens = 0
        while finished < streams:
            lane.poll()
            kinds = lane.read_log()["kind"]
            lane.acknowledge()
            tokens += int(np.count_nonzero(kinds == LogKind.TOKEN))
            finished += int(np.count_nonzero(kinds == LogKind.FINISH))
        elapsed = time.perf_counter() - start
        assert tokens == streams * each
        per_thousand = [
            1000 * (now - before) / tokens
            for now, before in ((transport.counters.reads, reads), (transport.counters.writes, writes))
        ]
        table.add_row(str(streams), f"{tokens / elapsed:,.0f}", *(f"{value:.1f}" for value in per_thousand))
    return table


def main() -> None:
    console = Console()
    with stand_in_engine() as path:
        transport = ShmTransport(path)
        lane = LaneClient(transport, read_ring_info(transport).geometry, 0, gateway_epoch=1, lease_timeout=600)
        lane.attach()
        console.print(round_trip_table(lane))
        console.print(stream_table(transport, lane))
        console.print(calls_table(transport, lane))


if __name__ == "__main__":
    main()
