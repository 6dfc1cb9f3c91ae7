"""The whole product under load, beside hostile neighbours and without: ``python -m bench.served --engine cuda``.

Writes a checkpoint of a geometry with random bf16 weights, serves it by ``blink up``, and lets ``blink bench`` send
Poisson arrivals by gRPC at several rates, first alone, then beside memory-hostile neighbours. Then it asks for chats by
gRPC and by HTTP in turns, and scrapes /metrics beside open streams. Outputs are as long as drawn: the end of a text is
ignored.

Gateway workers and load generator run on ``--dpu-cpus``, which stand for a DPU; the engine's process, ``blink up`` and
the neighbours share the other CPUs. Prints Markdown beside what is to be reached and what vLLM 0.26 took at
Llama-3-8B's geometry. Exits with 1 when a request failed, an output had another length than asked for, or the load
generator was too slow to be believed; the tables are printed all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import uvloop
from blink.v1 import inference_pb2_grpc
from numpy.typing import NDArray

from bench.cpus import move_process
from bench.engine_process import SMALL_MODELS
from bench.families import MODELS
from bench.first_tokens import in_turns
from bench.machine import Machine, write_json
from bench.random_checkpoint import folder_bytes, roomy_folder, write_checkpoint
from bench.served_report import REFERENCE_GEOMETRY, REFERENCES, Row, around, faults_of_streams, matrix
from bench.served_scrapes import Streamed, stream
from services.cli.bench.kinds import Arrivals, Prompts
from services.cli.bench.lengths import LogNormal
from services.cli.bench.report import Report
from services.cli.bench.resolve import resolve_grpc
from services.cli.bench.workload import Synthetic
from services.cli.errors import CommandError
from services.common.cpu import on_cpus, parse_cpus
from tests.cli.run_blink import BLINK
from tests.e2e.product import Product

PROMPTS, OUTPUTS = LogNormal(3.5, 1.0, 1, 1000), LogNormal(5.5, 0.75, 8, 1000)
SLOTS = 512  # of a gateway worker: every request of the highest rate, whichever worker it meets
SEED = 0
STREAM_SEEDS = (1 << 30, 1 << 31)
GEOMETRIES = MODELS | SMALL_MODELS


@dataclass
class Found:
    """All that was measured, and what speaks against it."""

    rows: list[Row]
    added_ms: list[float]
    streams: list[Streamed]  # without scrapes, then with them
    faults: list[str]


class Served:
    """The product on its CPUs, and what is asked of it."""

    def __init__(self, product: Product, arguments: argparse.Namespace) -> None:
        self._product, self._arguments = product, arguments
        self.address, self.url = product.address, product.http
        self.processes = self._processes()
        for pid in self.processes[1:]:
            move_process(pid, arguments.dpu)
        asking = {"prompts": Prompts.IDS, "temperature": 0.0, "ignore_eos": True, "timeout": 600.0}
        self.target = resolve_grpc(self.address, **asking)

    def loads(self, neighbours: int) -> list[Row]:
        """All rates by one ``blink bench``, the highest first, as its beginning is also the warm-up.

        Raises RuntimeError when it fails.
        """
        asked = self._arguments
        flags = [f"--rate={rate}" for rate in sorted(asked.rates, reverse=True)]
        flags += [f"--prompt-tokens={_words(PROMPTS)}", f"--output-tokens={_words(OUTPUTS)}", f"--seed={SEED}"]
        flags += [f"--seconds={asked.seconds}", f"--warm-up={asked.warm_up}", "--repeats=1"]
        flags += [f"--cpus={_list(asked.dpu)}", f"--processes={asked.processes}", f"--pid={self.processes[0]}"]
        if neighbours:
            flags += [f"--interfere={neighbours}", f"--interfere-cpus={_list(asked.host)}"]
        with tempfile.TemporaryDirectory() as folder:
            command = [*BLINK, "bench", f"--address={self.address}", *flags, f"--output={folder}"]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
            if done.returncode:
                raise RuntimeError(f"blink bench beside {neighbours} neighbours ended with exit code {done.returncode}")
            report = Report.model_validate_json((Path(folder) / "bench.json").read_text())
        drawn = Synthetic(Arrivals.POISSON, 1.0, PROMPTS, OUTPUTS, asked.seconds)
        return [
            Row(point, sum(request.output_tokens for request in drawn.requests(point.load, SEED)))
            for point in report.points
        ]

    def http_adds(self) -> list[float]:
        """p10, p50 and p90 of milliseconds that a chat's first token takes longer by HTTP than by gRPC, in pairs."""

        async def ask() -> NDArray[np.float64]:
            host, _, port = self.url.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            async with grpc.aio.insecure_channel(self.address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                times = await in_turns(stub, reader, writer, self.target.model, self._arguments.pairs)
            writer.close()
            return times

        with on_cpus(self._arguments.dpu):
            times = uvloop.run(ask())
        found: list[float] = np.percentile((times[:, 1] - times[:, 0]) * 1e3, (10, 50, 90)).tolist()
        return found

    def stream(self, *, scraped: bool) -> Streamed:
        """All streams once, with scrapes or without."""
        asked = self._arguments
        with on_cpus(asked.dpu):
            url, seed = self.url if scraped else None, STREAM_SEEDS[scraped]
            return stream(self.target, asked.streams, asked.stream_tokens, asked.processes, url, seed)

    def faults(self) -> Iterator[str]:
        """Why the product is not what was set up: a process that was restarted is on other CPUs."""
        if (now := self._processes()) != self.processes:
            yield f"a process of the product was restarted: {self.processes} were there, now {now}"

    def _processes(self) -> list[int]:
        """The bootstrap's, in which the engine runs, and the gateway workers'."""
        workers = range(self._arguments.workers)
        return [self._product.bootstrap.pid, *(self._product.gateway(worker).pid for worker in workers)]


@contextmanager
def serving(arguments: argparse.Namespace, log: Path | None) -> Iterator[Served]:
    """A checkpoint and the product on it, pinned; all of it is gone on leaving. Raises RuntimeError."""
    config = GEOMETRIES[arguments.geometry]
    folder, runtime = roomy_folder(folder_bytes(config)), Path(tempfile.mkdtemp(prefix="blink-served-"))
    try:
        began = time.monotonic()
        write_checkpoint(folder, config)
        say(f"{folder_bytes(config) / 1e9:.1f} GB of weights in {folder}, {time.monotonic() - began:.1f} s")
        flags = ["--model", str(folder), "--engine", arguments.engine, "--workers", str(arguments.workers)]
        flags += ["--set", f"bootstrap.slots_per_lane={SLOTS}", "--set", f"bootstrap.lanes={arguments.workers}"]
        flags += [word for setting in arguments.set for word in ("--set", setting)]
        with on_cpus(arguments.host):
            product = Product(runtime, *flags, instance=f"served-{os.getpid()}")
        try:
            began = time.monotonic()
            while product.process.poll() is None and not any("serving" in line for line in product.lines):
                if time.monotonic() - began > arguments.start_limit:
                    raise RuntimeError(f"blink up does not serve after {arguments.start_limit:g} s")
                time.sleep(0.05)
            served = Served(product, arguments)
            say(f"serves after {time.monotonic() - began:.1f} s")
            yield served
            if (code := product.stop()) != 0 or product.left_behind():
                raise RuntimeError(f"blink up ended with exit code {code} and left {product.left_behind()}")
        finally:
            product.destroy()
            if log is not None:
                log.write_text("\n".join([*product.lines, ""]))
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(runtime)


def measure(served: Served, arguments: argparse.Namespace, found: Found) -> None:
    """Fill in what is found, the quick parts first; a part that fails is a fault, and the others go on."""

    def matrix_beside(neighbours: int) -> None:
        found.rows += served.loads(neighbours)

    def http() -> None:
        found.added_ms = served.http_adds()

    def scrapes() -> None:
        found.streams = [served.stream(scraped=False), served.stream(scraped=True)]

    parts: dict[str, Callable[[], None]] = {"chats by HTTP": http, "scrapes": scrapes}
    for count in dict.fromkeys((0, arguments.neighbours)):
        parts[f"loads beside {count} neighbours"] = partial(matrix_beside, count)
    for name, part in parts.items():
        began = time.monotonic()
        try:
            part()
        except (RuntimeError, ValueError, OSError, grpc.RpcError, CommandError) as error:
            found.faults.append(f"{name}: {error}")
        say(f"{name}: {time.monotonic() - began:.1f} s")
        keep(found, arguments)
    found.faults += served.faults()


def tables(found: Found, arguments: argparse.Namespace) -> Iterator[str]:
    """All lines of the report, faults last."""
    machine = Machine.of_this()
    yield (
        f"{arguments.geometry}, {arguments.engine} engine, random weights; {machine.gpu}, driver {machine.driver}; "
        f"{machine.cpus}; {arguments.workers} gateway workers and the load generator on CPUs {_list(arguments.dpu)}, "
        f"the engine's process and the neighbours on {_list(arguments.host)}; Poisson arrivals for "
        f"{arguments.seconds:g} s, prompts {_words(PROMPTS)}, outputs {_words(OUTPUTS)}; commit {machine.commit}"
    )
    yield ""
    yield from matrix(found.rows, REFERENCES if arguments.geometry == REFERENCE_GEOMETRY else {})
    yield ""
    yield from around(found.added_ms, arguments.streams, found.streams)
    yield ""
    yield from (f"- **FAULT** {fault}" for fault in faults_of(found, arguments))


def faults_of(found: Found, arguments: argparse.Namespace) -> list[str]:
    rows = [fault for row in found.rows for fault in row.faults()]
    return [*found.faults, *rows, *faults_of_streams(arguments.streams, found.streams)]


def keep(found: Found, arguments: argparse.Namespace) -> None:
    """What there is so far, in the file that was asked for."""
    results = {
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "rows": [{"point": row.point.model_dump(), "expected_tokens": row.expected_tokens} for row in found.rows],
        "http_adds_ms": found.added_ms,
        "streams": [asdict(run) for run in found.streams],
        "faults": faults_of(found, arguments),
    }
    write_json(arguments.json, "served", results)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _words(lengths: LogNormal) -> str:
    return f"lognormal:{lengths.mu:g}:{lengths.sigma:g}:{lengths.low}:{lengths.high}"


def _list(cpus: frozenset[int]) -> str:
    return ",".join(map(str, sorted(cpus)))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments; exits where they contradict each other or the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama3-8b")
    parser.add_argument("--rates", type=float, nargs="+", default=list(REFERENCES), help="requests a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals, each point")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds of the highest rate before the points")
    parser.add_argument("--neighbours", type=int, default=48)
    parser.add_argument("--dpu-cpus", dest="dpu", type=parse_cpus, default="0-3", help="of gateways and load generator")
    parser.add_argument("--workers", type=int, default=2, help="of the gateway")
    parser.add_argument("--processes", type=int, default=2, help="of the load generator")
    parser.add_argument("--pairs", type=int, default=300, help="of chats by gRPC and by HTTP, half of them warm-up")
    parser.add_argument("--streams", type=int, default=256, help="beside scrapes")
    parser.add_argument("--stream-tokens", type=int, default=900, help="of each of them")
    parser.add_argument("--set", action="append", default=[], help="a setting for blink up, bootstrap.NAME=VALUE")
    parser.add_argument("--start-limit", type=float, default=300.0, help="seconds until the product must serve")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="where to write what the product says")
    arguments = parser.parse_args(words)
    arguments.host = frozenset(os.sched_getaffinity(0)) - arguments.dpu
    if not arguments.host or not arguments.dpu <= os.sched_getaffinity(0):
        parser.error(f"--dpu-cpus {_list(arguments.dpu)} must be some, not all, of {sorted(os.sched_getaffinity(0))}")
    if arguments.pairs < 2:
        parser.error(f"--pairs is {arguments.pairs}, at least 2 are needed: half of them are warm-up")
    return arguments


def main() -> None:
    arguments = parse()
    found = Found([], [], [], [])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit leaves nothing running, and tables
    try:
        with serving(arguments, arguments.log) as served:
            measure(served, arguments, found)
    except KeyboardInterrupt:
        found.faults.append("stopped")
    except (RuntimeError, AssertionError, OSError, subprocess.SubprocessError, CommandError) as error:
        found.faults.append(f"the product: {error}")
    keep(found, arguments)
    print("\n".join(tables(found, arguments)))
    sys.exit(1 if faults_of(found, arguments) else 0)


if __name__ == "__main__":
    main()
