"""Where the time to a first token goes, stage by stage: ``python -m bench.stages``.

An engine that takes a GPU's time (``bench.paced_engine``), gateway workers and the load generator of ``blink bench``,
each in processes of their own; Poisson arrivals with prompts and outputs as in ``bench.served``. Every row is the
median, and the last column the P99, of one stage over all requests of a rate; the engine's two are its own, so that all
others are the gateway's and the client's. CPU time is the kernel's account of the processes, a token.

``--python`` names interpreters of checkouts whose gateways are measured in turns, so that a busy machine is busy for
all of them: the first is compared with the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.gateway import cpu_seconds, granted_ring, process
from bench.paced_engine import key_of
from services.cli.bench.fleet import fleet
from services.cli.bench.generator import Share
from services.cli.bench.kinds import Arrivals, Prompts
from services.cli.bench.lengths import SHAREGPT_PROMPT, parse_lengths
from services.cli.bench.prompts import make_ids, make_text
from services.cli.bench.resolve import resolve_grpc
from services.cli.bench.target import Target
from services.cli.bench.workload import Request, Synthetic

WARM_UP = 2.0  # seconds of the highest rate, and half of that is not told of any rate
STAGES = {
    "client → handler": ("sent", "entered"),
    "handler → ring": ("entered", "in_ring"),
    "engine: until its step": ("in_ring", "begun"),
    "engine: the step": ("begun", "logged"),
    "log → seen": ("logged", "seen"),
    "seen → writing": ("seen", "writing"),
    "writing → client": ("writing", "received"),
}
OURS = [name for name in STAGES if not name.startswith("engine")]


@dataclass
class Measured:
    """One rate with one gateway: seconds of each stage by request, and what else it took."""

    stages: dict[str, NDArray[np.float64]]
    total: NDArray[np.float64]
    gateway_cpu: float  # seconds a token
    client_cpu: float

    @property
    def ours(self) -> NDArray[np.float64]:
        """[requests]: all but the engine's."""
        ours: NDArray[np.float64] = np.stack([self.stages[name] for name in OURS]).sum(axis=0)
        return ours


def client_key(request: Request, target: Target) -> str:
    """Of the prompt that the load generator makes."""
    if target.prompts is Prompts.TEXT:
        return key_of(make_text(request).encode())
    return key_of(np.array(make_ids(request, target.vocabulary), np.uint32).tobytes())


def marks_of(share: Share, requests: Sequence[Request], target: Target) -> dict[str, dict[str, float]]:
    """What the client saw of one process's requests. Raises RuntimeError when one failed."""
    found = {}
    for outcome, request in zip(share.outcomes, requests, strict=True):
        if not outcome.good or outcome.output_tokens != request.output_tokens:
            raise RuntimeError(f"{outcome.error or 'no error'}, {outcome.output_tokens} tokens of {request}")
        found[client_key(request, target)] = {"sent": outcome.sent, "received": outcome.arrivals[0]}
    return found


def stages_of(marks: Mapping[str, Mapping[str, Any]], keys: Sequence[str]) -> Measured:
    """Times of each request, lined up; whose CPU it was is not known yet."""
    column = {mark: np.array([marks[key][mark] for key in keys]) for span in STAGES.values() for mark in span}
    stages = {name: column[end] - column[begin] for name, (begin, end) in STAGES.items()}
    return Measured(stages, column["received"] - column["sent"], 0.0, 0.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def measure(python: str, options: argparse.Namespace, seed: int) -> dict[float, Measured]:
    """All rates with the gateway of one checkout."""
    async with granted_ring() as (directory, ring):
        address = f"127.0.0.1:{free_port()}"
        marks: dict[str, dict[str, Any]] = {}
        keys: dict[float, list[str]] = {}
        cpu: dict[float, tuple[float, float]] = {}
        prompts, outputs = (
            parse_lengths(text, SHAREGPT_PROMPT) for text in (options.prompt_tokens, options.output_tokens)
        )
        engine_marks = directory / "engine.json"
        gateway_marks = [directory / f"gateway-{worker}.json" for worker in range(options.workers)]
        async with AsyncExitStack() as stack:
            engine = process(
                *("bench.paced_engine", str(ring), str(engine_marks), f"--lanes={options.workers}"), ready="READY"
            )
            await stack.enter_async_context(engine)
            gateways = [
                await stack.enter_async_context(
                    process(
                        *(str(Path(__file__).parent / "marked_gateway.py"), str(path), f"--listen={address}"),
                        *("--http-listen=off", f"--bootstrap=unix:{directory / 'bootstrap'}", f"--worker={worker}"),
                        *options.flags,
                        ready='"attached"',
                        python=python,
                        BLINK_RUNTIME_DIR=str(directory),
                    )
                )
                for worker, path in enumerate(gateway_marks)
            ]
            asking = {"prompts": options.prompts, "temperature": 0.0, "ignore_eos": True, "timeout": 60.0}
            target = await asyncio.to_thread(resolve_grpc, address, **asking)
            with fleet(options.processes, target) as load:
                for rate in sorted(options.rates, reverse=True):
                    workload = Synthetic(Arrivals.POISSON, 1.0, prompts, outputs, options.seconds + WARM_UP)
                    requests = workload.requests(rate, seed)
                    before = sum(map(cpu_seconds, gateways))
                    shares = await asyncio.to_thread(load.run, requests)
                    tokens = sum(request.output_tokens for request in requests)
                    used = sum(map(cpu_seconds, gateways)) - before
                    cpu[rate] = used / tokens, sum(share.cpu_seconds for share in shares) / tokens
                    for index, share in enumerate(shares):
                        marks |= marks_of(share, requests[index :: load.size], target)
                    told = [request for request in requests if request.at >= WARM_UP]
                    keys[rate] = [client_key(request, target) for request in told]
        for path in gateway_marks:
            for key, mark in json.loads(path.read_text()).items():
                marks[key] |= mark
        of_engine = json.loads(engine_marks.read_text())
        for mark in marks.values():
            mark["begun"], mark["logged"] = of_engine[mark["engine"]]
    found = {rate: stages_of(marks, keys[rate]) for rate in keys}
    for rate, measured in found.items():
        measured.gateway_cpu, measured.client_cpu = cpu[rate]
    return found


def pooled(runs: Sequence[Measured]) -> Measured:
    """Several runs as one."""
    stages = {name: np.concatenate([run.stages[name] for run in runs]) for name in STAGES}
    cpu = (float(np.mean([getattr(run, name) for run in runs])) for name in ("gateway_cpu", "client_cpu"))
    return Measured(stages, np.concatenate([run.total for run in runs]), *cpu)


def table_of(rate: float, found: Sequence[Measured]) -> Table:
    """One rate; a pair of columns for each checkout, the medians of the first as ratios of the others'."""
    names = [f"{what}{number or ''}" for number in range(len(found)) for what in ("p50 ms", "p99 ms")]
    table = Table("stage", *names, *(f"ratio to {number}" for number in range(1, len(found))))
    rows = [(name, [each.stages[name] for each in found]) for name in STAGES]
    rows += [("gateway and client", [each.ours for each in found]), ("time to first token", [e.total for e in found])]
    for name, times in rows:
        table.add_row(
            name,
            *(f"{value * 1e3:.2f}" for each in times for value in np.percentile(each, (50, 99))),
            *(f"{np.median(times[0]) / np.median(other):.2f}" for other in times[1:]),
        )
    for name, values in (
        ("gateway CPU µs/token", [each.gateway_cpu for each in found]),
        ("client CPU µs/token", [each.client_cpu for each in found]),
    ):
        cells = [cell for value in values for cell in (f"{value * 1e6:.0f}", "")]
        table.add_row(name, *cells, *(f"{values[0] / other:.2f}" for other in values[1:]))
    table.title = f"{rate:g} requests/s, {found[0].total.size} requests"
    return table


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 8, 16], help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals, each rate")
    parser.add_argument("--prompts", type=Prompts, default=Prompts.IDS, choices=list(Prompts))
    parser.add_argument("--prompt-tokens", default="lognormal:3.5:1.0:1:1000", help="as of blink bench")
    parser.add_argument("--output-tokens", default="lognormal:5.5:0.75:8:1000")
    parser.add_argument("--workers", type=int, default=1, help="of the gateway")
    parser.add_argument("--processes", type=int, default=1, help="of the load generator")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters of gateways' checkouts")
    parser.add_argument("flags", nargs="*", help="for the gateways, after --")
    options = parser.parse_args()
    began = time.monotonic()
    runs: list[list[dict[float, Measured]]] = [[] for _ in options.python]
    for repeat in range(options.repeats):
        for number, python in enumerate(options.python):
            runs[number].append(await measure(python, options, seed=repeat))
    for rate in sorted(options.rates):
        found = [pooled([run[rate] for run in of_python]) for of_python in runs]
        Console(width=150).print(table_of(rate, found))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    uvloop.run(main())
