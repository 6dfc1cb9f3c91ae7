"""GPU-resident against CPU-resident scheduling, host idle and host loaded: ``python -m bench.ablation``.

The comparison of the paper's Figure 3. One engine with random bf16 weights, by default of Llama-3-8B's geometry,
scheduled by the loop on the GPU and by the host-driven loop: same core, kernels, buckets, ring and requests. Both serve
the same Poisson arrivals (a seed fixes them) and short requests one at a time, alone and beside memory-hostile
neighbours on the host's other cores (services/cli/bench/neighbours.py).

Who runs where: the client, which is this process, has a core of its own; the thread of the host-driven loop has another
one, in the last row the neighbours' cores; everything else of the engine's process shares the neighbours' cores. What
would be the client's or the loop's core by another hyperthread stays empty.

TTFT and TPOT are what the client sees in the ring. TPOT is a request's mean time from token to token, "pause" each time
between two tokens of a request, "gap" from the end of a step's last kernel to the start of the next one's first by the
GPU's timer while the load runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.cpus import Cores, throttled_ms
from bench.engine_process import EngineSpec, engine_process
from bench.machine import commit
from bench.ring_load import Asked, LoadClient, Request, poisson
from bench.step_times import gaps_us
from services.cli.bench.neighbours import KINDS, Neighbours, neighbours
from services.common.cpu import cpu_name, on_cpus
from services.gpu_engine.cuda.assemble import SchedulerPlace
from services.gpu_engine.engine import EngineLimits
from services.ring.schema import RingGeometry, record_bytes

PROMPT, GENERATED, SHORT_PROMPT, SHORT_GENERATED = (64, 256), 64, 50, 2
SLOTS = 256
GEOMETRY = RingGeometry(
    lanes=1, slots_per_lane=SLOTS, arena_bytes=SLOTS * record_bytes(PROMPT[1], GENERATED), log_entries=1 << 14
)
LIMITS = EngineLimits(
    context=1024,
    page_size=16,
    kv_pages=8192,
    max_running=256,
    max_batched_tokens=2048,
    max_waiting=1024,
    lease_timeout_ms=600_000,
)


@dataclass
class Seen:
    """One row of the table, times in seconds."""

    name: str
    alone: NDArray[np.float64]  # TTFT
    first: NDArray[np.float64]  # TTFT under load
    each: NDArray[np.float64]  # TPOT
    pause: NDArray[np.float64]
    tokens_per_second: float
    steps: tuple[int, int]  # while the load ran
    rates: list[float]
    throttled_ms: float
    gaps: NDArray[np.float64]  # µs

    def p99(self) -> dict[str, float]:
        return {
            "TTFT alone": float(np.percentile(self.alone, 99)),
            "TTFT": float(np.percentile(self.first, 99)),
            "TPOT": float(np.percentile(self.each, 99)),
        }


def measure(name: str, client: LoadClient, load: Sequence[Request], short: Sequence[Request], seconds: float) -> Seen:
    throttled = throttled_ms()
    alone = client.one_at_a_time(short, seconds)
    first = client.steps
    began = time.perf_counter()
    asked: list[Asked] = client.run(load)
    span = time.perf_counter() - began
    for request in (*alone, *asked):
        if len(request.arrivals) not in (SHORT_GENERATED, GENERATED):
            raise RuntimeError(f"a request got {len(request.arrivals)} tokens")
    return Seen(
        name,
        alone=np.array([request.first for request in alone]),
        first=np.array([request.first for request in asked]),
        each=np.array([request.each for request in asked]),
        pause=np.concatenate([np.diff(request.arrivals) for request in asked]),
        tokens_per_second=GENERATED * len(asked) / span,
        steps=(first + 1, client.steps),
        rates=[],
        throttled_ms=throttled_ms() - throttled,
        gaps=np.zeros(0),
    )


def run(arguments: argparse.Namespace, cores: Cores) -> tuple[list[Seen], str]:
    """All rows, and the GPU's name."""
    rows: list[Seen] = []
    gpu = ""
    schedulers: tuple[SchedulerPlace, ...] = ("gpu", "host")
    for scheduler in schedulers:
        spec = EngineSpec(arguments.model, scheduler, GEOMETRY, LIMITS, cores.loop)
        found, gpu = run_one(spec, arguments, cores)
        rows += found
        print(f"measured: {scheduler}", file=sys.stderr, flush=True)
    return rows, gpu


def run_one(spec: EngineSpec, arguments: argparse.Namespace, cores: Cores) -> tuple[list[Seen], str]:
    """The rows of one scheduler, and the GPU's name."""
    ask = partial(poisson, vocabulary=spec.config.vocabulary)
    load = ask(arguments.rate, arguments.seconds, prompt=PROMPT, max_tokens=GENERATED, seed=1)
    short = ask(1.0, 2_000.0, prompt=(SHORT_PROMPT, SHORT_PROMPT), max_tokens=SHORT_GENERATED, seed=2)
    name = "GPU" if spec.scheduler == "gpu" else "host"
    rows: list[Seen] = []
    with engine_process(spec, cores.others) as engine:
        client = LoadClient(engine.region, 1, prompt=PROMPT[1], max_tokens=GENERATED)

        def beside(running: Neighbours, what: str) -> None:
            with running.measured() as rates:
                seen = measure(f"{name}, {what}", client, load, short, arguments.alone)
            seen.rates = rates
            rows.append(seen)

        client.one_at_a_time(short, 0.3)
        client.run(load[: len(load) // 8])  # the first steps of each bucket are slower
        rows.append(measure(f"{name}, idle host", client, load, short, arguments.alone))
        with neighbours(arguments.neighbours, cores.others) as running:
            beside(running, "neighbours")
            if spec.scheduler == "host":
                engine.move_threads(cores.loop, cores.others)
                beside(running, "neighbours on its core too")
        engine.stop()
        times = engine.times()
    for seen in rows:
        seen.gaps = gaps_us(times, *seen.steps)
    return rows, engine.gpu


def report(rows: list[Seen], arguments: argparse.Namespace, cores: Cores, gpu: str) -> Iterator[str]:
    yield f"{gpu}; {cpu_name()}, client on CPU {cores.client}, loop on {cores.loop}, {len(cores.others)} others; "
    yield f"{arguments.neighbours} neighbours; {arguments.rate:g} requests/s of {PROMPT[0]} to {PROMPT[1]} prompt and "
    yield f"{GENERATED} generated tokens for {arguments.seconds:g} s; commit {commit()}\n"
    yield "| scheduled by | TTFT alone p50 / p99 ms | TTFT p50 / p99 ms | TPOT p50 / p99 ms |"
    yield " pause p50 / p99 / max ms | gap p50 / p99 µs | tokens/s | requests |"
    yield f" {' / '.join(KINDS)} GB/s | throttled ms |\n"
    yield "|---" * 10 + "|\n"
    for seen in rows:
        cells = [
            seen.name,
            *(both(values * 1e3, 2) for values in (seen.alone, seen.first, seen.each)),
            f"{both(seen.pause * 1e3, 2)} / {seen.pause.max() * 1e3:.1f}",
            both(seen.gaps, 1),
            f"{seen.tokens_per_second:,.0f}",
            str(seen.first.size),
            " / ".join(f"{rate:.0f}" for rate in seen.rates) or "none",
            f"{seen.throttled_ms:.0f}",
        ]
        yield "| " + " | ".join(cells) + " |\n"
    yield "\n| P99 relative to the idle host | TTFT alone | TTFT | TPOT | within 5% |\n|---|---|---|---|---|\n"
    idle: Seen | None = None
    for seen in rows:
        if seen.name.endswith("idle host"):
            idle = seen
            continue
        assert idle is not None
        ratios = {name: value / idle.p99()[name] for name, value in seen.p99().items()}
        verdict = "yes" if max(ratios["TTFT"], ratios["TPOT"]) <= 1.05 else "no"
        yield f"| {seen.name} | " + " | ".join(f"{ratio:.3f}" for ratio in ratios.values()) + f" | {verdict} |\n"


def both(values: NDArray[np.float64], digits: int) -> str:
    return " / ".join(f"{np.percentile(values, percent):.{digits}f}" for percent in (50, 99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neighbours", type=int, default=3 * len(os.sched_getaffinity(0)), help="3 times the CPUs")
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals, each row")
    parser.add_argument("--alone", type=float, default=3.0, help="seconds of requests one at a time, each row")
    parser.add_argument("--rate", type=float, default=60.0, help="requests a second")
    parser.add_argument("--model", default="llama3-8b", help="of bench/families.py; tiny to try the script itself")
    arguments, cores = parser.parse_args(), Cores.of_this_machine()
    with on_cpus({cores.client}):
        rows, gpu = run(arguments, cores)
    print("".join(report(rows, arguments, cores, gpu)))


if __name__ == "__main__":
    main()
