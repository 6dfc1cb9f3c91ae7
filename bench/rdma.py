"""The ring over RDMA beside shared memory: latencies and CPU as ratios, operations and bytes as they are.

    python -m bench.rdma

Runs in the emulated machine of `make test-rdma`, whose times mean nothing by themselves: both transports are measured
there, against the same stand-in engine, and only their ratio is shown. Operations and bytes carry over to hardware.
One gateway process looks at its lane as fast as it can for latencies, and every 20 ms for the costs of a token.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from services.ring.record import pack_record
from services.ring.shm import ShmTransport
from services.ring.transport import Transport
from tests.rdma.lanes import GEOMETRY, attach

REQUESTS = 60  # one after another, of one token each
STREAMS = 8
TOKENS = 400  # of each stream
PROMPT = list(range(100, 164))
LOOK_SECONDS = 0.02
MARK = "BENCH "


@dataclass(frozen=True)
class Costs:
    """Of one transport. Seconds are the emulated machine's."""

    submit: float  # until the call that submits returns
    delivery: float  # from there until the first token is in the gateway's hands
    cpu_per_token: float
    writes_per_request: float
    written_bytes_per_request: float
    posts_per_request: float
    reads_per_token: float
    read_bytes_per_token: float


def measure(transport: Transport) -> Costs:
    client = attach(transport)
    submits, deliveries = [], []
    for number in range(REQUESTS):
        record = pack_record(PROMPT, slot=number % STREAMS, max_tokens=1)
        begun = time.perf_counter()
        client.submit(record, number % STREAMS * 4096)
        submitted = time.perf_counter()
        while not _ended(client.poll() and client.read_log()):
            client.acknowledge()
        deliveries.append(time.perf_counter() - submitted)
        submits.append(submitted - begun)
    start = asdict(transport.counters)
    records = [pack_record(PROMPT, slot=slot, max_tokens=TOKENS) for slot in range(STREAMS)]
    for slot, record in enumerate(records):
        client.submit(record, slot * 4096)
    submitted_costs = asdict(transport.counters)
    ended, cpu = 0, 0.0
    while ended < STREAMS:
        time.sleep(LOOK_SECONDS)
        begun = time.thread_time()
        client.poll()
        ended += _ended(client.read_log())
        client.acknowledge()
        cpu += time.thread_time() - begun
    end = asdict(transport.counters)
    tokens = STREAMS * TOKENS
    return Costs(
        submit=statistics.median(submits),
        delivery=statistics.median(deliveries),
        cpu_per_token=cpu / tokens,
        writes_per_request=(end["writes"] - start["writes"]) / STREAMS,
        written_bytes_per_request=(end["written_bytes"] - start["written_bytes"]) / STREAMS,
        posts_per_request=(submitted_costs["posts"] - start["posts"]) / STREAMS,
        reads_per_token=(end["reads"] - start["reads"]) / tokens,
        read_bytes_per_token=(end["read_bytes"] - start["read_bytes"]) / tokens,
    )


def _ended(entries: np.ndarray) -> int:
    from services.ring.schema import LogKind  # noqa: PLC0415

    return int((entries["kind"] == LogKind.FINISH).sum())


@contextmanager
def shared_memory() -> Iterator[Transport]:
    """A stand-in engine with a ring like the one over RDMA."""
    path = Path("/dev/shm/blink-bench")
    sizes = (f"--slots={GEOMETRY.slots_per_lane}", f"--arena-bytes={GEOMETRY.arena_bytes}")
    command = [sys.executable, "-m", "tests.support.stand_in_engine", str(path), *sizes]
    with subprocess.Popen(
        [*command, f"--log-entries={GEOMETRY.log_entries}", "--idle-sleep=0.005"], stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "READY\n"
        yield ShmTransport(path)
        engine.terminate()


def test_measure() -> None:
    """Inside the emulated machine."""
    from services.ring.verbs.device import Device  # noqa: PLC0415 (needs pyverbs)
    from tests.rdma.sides import HostProcess, connection  # noqa: PLC0415

    with shared_memory() as transport:
        print(MARK + json.dumps({"shm": asdict(measure(transport))}))
    host = HostProcess()
    host.ask(do="serve", engine="stand-in")
    device = Device("rxe_dpu")
    try:
        with connection(host, device, 0) as transport:
            print(MARK + json.dumps({"verbs": asdict(measure(transport))}))
    finally:
        host.kill()


def main() -> None:
    from rich.console import Console  # noqa: PLC0415 (not inside)
    from rich.table import Table  # noqa: PLC0415

    from tests.rdma.vm.machine import run_tests  # noqa: PLC0415

    reports, console = run_tests([f"{Path(__file__).relative_to(Path.cwd())}::test_measure"])
    costs: dict[str, dict[str, float]] = {}
    for report in reports:
        for _, text in report["sections"]:
            for line in text.splitlines():
                if line.startswith(MARK):
                    costs |= json.loads(line.removeprefix(MARK))
    if len(costs) < 2:
        sys.exit(console)
    table = Table("of one gateway", "shm", "verbs", "verbs / shm", title="The ring: shared memory and RDMA")
    for name, shm in costs["shm"].items():
        verbs = costs["verbs"][name]
        ratio = f"{verbs / shm:.1f}" if shm else ""
        timed = name in {"submit", "delivery", "cpu_per_token"}
        values = ("", "") if timed else (f"{shm:.3g}", f"{verbs:.3g}")
        table.add_row(name.replace("_", " "), *values, ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
