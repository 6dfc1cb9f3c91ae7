"""What the control loop costs, measured on the GPU: ``python -m bench.control_loop``.

The step is two tiny kernels, so that what is between steps stands out. Every figure comes with the check that all
requests of its run got the tokens that they must get.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from services.gpu_engine.cuda.compiler import Compiler, default_cache
from services.gpu_engine.cuda.control_loop.build import THREADS
from services.gpu_engine.cuda.driver import Buffer, Device, Module, Stream
from services.gpu_engine.cuda.graph_cache import Record, default_buckets
from services.ring.schema import DescriptorFlag, FinishReason, record_bytes
from tests.gpu.serving import Serving, StandInStep, finish, serving
from tests.gpu_engine.core.machine import record

LANES = 4
VOCABULARY = 32_000
PROMPT = list(range(1, 51))
TIMES = np.dtype([("begin", "<u8"), ("end", "<u8"), ("rows", "<u8")])
KEPT = 8192
SECONDS = 3.0  # of each look at the power


class _BenchStep(ctypes.Structure):
    """BenchStep of control_loop_step.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("counts", "sampling", "tokens", "logprobs", "times", "number")),
        ("vocabulary", ctypes.c_uint32),
    )


class TimedStep:
    """Records the bench's step and reads its times."""

    def __init__(self, delay_us: float) -> None:
        self._delay = ctypes.c_uint64(int(delay_us * 1e3))
        self._module = Module(Compiler(Device().arch, default_cache()).build(("bench/control_loop_step.cu",), {}))
        self._times = Buffer.of(np.zeros(KEPT, TIMES).view(np.uint8))
        self._number = Buffer.of(np.zeros(1, np.uint64))

    def record(self, step: StandInStep) -> Record:
        known = {name: getattr(step.argument, name) for name in ("counts", "sampling", "tokens", "logprobs")}
        argument = _BenchStep(**known, times=self._times.pointer, number=self._number.pointer, vocabulary=VOCABULARY)

        def record(stream: Stream, _bucket: int) -> None:
            self._module.kernel("bench_begin").launch(stream, (1, 1, 1), 1, (argument, self._delay))
            self._module.kernel("bench_end").launch(stream, (1, 1, 1), 256, (argument,))

        return record

    def times(self) -> npt.NDArray[np.void]:
        """[KEPT] of TIMES, in order of the steps' numbers modulo KEPT; only after the loop's end."""
        return self._times.download(TIMES, (KEPT,))


@contextmanager
def bench_engine(
    step: TimedStep,
    rows: int,
    tokens: int,
    *,
    threads: int = THREADS,
    trace: bool = False,
    prefix_cache: bool = False,
    share_decoded: bool = False,
    budget: int = 256,
    **settings: int,
) -> Iterator[Serving]:
    """An engine with room for ``rows`` requests of ``tokens`` tokens beside PROMPT in LANES lanes."""
    slots = -(-rows // LANES)
    context = len(PROMPT) + tokens
    budget = max(rows, budget)
    with serving(
        lanes=LANES,
        slots=slots,
        arena_bytes=slots * record_bytes(len(PROMPT), tokens),
        log_entries=max(1 << 18, 4 * slots + 21),  # nobody has to read while it runs
        max_context=context,
        vocabulary=VOCABULARY,
        buckets=default_buckets(budget),
        decode_buckets=(),
        make_record=step.record,
        scheduler="gpu",
        ring_place="host",
        threads=threads,
        trace=trace,
        page_size=16,
        page_count=rows * (context // 16 + 1),
        max_running=rows,
        max_batched_tokens=budget,
        prefix_cache=prefix_cache,
        share_decoded=share_decoded,
        **settings,
    ) as engine:
        yield engine


def expected(history: int, seed: int, tokens: int) -> list[int]:
    return [((history + i) * 31 + seed) % VOCABULARY for i in range(tokens)]


def run_load(engine: Serving, rows: int, tokens: int) -> None:
    """``rows`` requests at once, to their ends; checks every token."""
    gateways = [engine.attach(lane) for lane in range(LANES)]
    asked = []
    span = record_bytes(len(PROMPT), tokens)
    for request in range(rows):
        gateway, slot = gateways[request % LANES], request // LANES
        packed = record(PROMPT, slot=slot, max_tokens=tokens, seed=request, flags=DescriptorFlag.IGNORE_EOS)
        asked.append((gateway, gateway.submit(packed, slot * span), request))
    while int(engine.status().counters["finished"].sum()) < rows:
        time.sleep(0.01)
    finish(*gateways)
    for gateway, position, seed in asked:
        stream = gateway.stream(position)
        assert stream.reason is FinishReason.LENGTH
        assert stream.tokens == expected(len(PROMPT), seed, tokens)


Times = npt.NDArray[np.int64]


def timed_run(
    rows: int, delay_us: float, threads: int, *, trace: bool, prefix_cache: bool = False
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void], int]:
    """Times of each step in order, the loop's trace by step number, and how often the loop was launched."""
    tokens = 1200
    step = TimedStep(delay_us)
    with bench_engine(step, rows, tokens, threads=threads, trace=trace, prefix_cache=prefix_cache) as engine:
        run_load(engine, rows, tokens)
        steps = int(engine.status().engine["steps"])
        engine.stop()
        return step.times()[:steps], engine.gpu_loop.trace(), engine.gpu_loop.executions


def gap_row(rows: int, delay_us: float, threads: int, prefix_cache: bool) -> list[str]:
    """Last kernel of a step to first of the next; then the stages, from a run of a loop that notes its times."""
    times, _, executions = timed_run(rows, delay_us, threads, trace=False, prefix_cache=prefix_cache)
    full = times["rows"] == rows
    gaps = (times["begin"][1:].astype(np.int64) - times["end"][:-1].astype(np.int64))[full[1:] & full[:-1]] / 1e3

    times, trace, _ = timed_run(rows, delay_us, threads, trace=True, prefix_cache=prefix_cache)
    last = np.arange(max(2, times.size - 600), times.size)  # numbers begin at 1: step n lies at n - 1
    now, before = trace[last % trace.size], trace[(last - 1) % trace.size]
    stages: list[Times] = [
        times["end"][last - 2],
        before["ended"],
        *(now[name] for name in ("retired", "absorbed", "planned", "launched")),
    ]
    after: list[Times] = [now[name] for name in ("launched", "published", "polled")]

    def medians(marks: list[Times]) -> Iterator[str]:
        for a, b in itertools.pairwise(marks):
            yield f"{np.median(b.astype(np.int64) - a.astype(np.int64)) / 1e3:.2f}"

    return [
        str(rows),
        f"{delay_us:.0f}",
        str(threads),
        *(f"{np.percentile(gaps, p):.2f}" for p in (50, 90, 99)),
        *medians([*stages, times["begin"][last - 1]]),
        *medians(after),
        f"{gaps.size} / {executions}",
    ]


def gap_table(delays: list[float], threads: list[int], prefix_cache: bool) -> Table:
    cache = ", with the prefix cache" if prefix_cache else ""
    table = Table(title=f"End of one step to start of the next, µs (GPU's global timer){cache}")
    names = (
        "rows",
        "step ≥",
        "threads",
        "p50",
        "p90",
        "p99",
        "end→retire",
        "seen",
        "absorb",
        "plan",
        "launch",
        "begun",
    )
    for name in (*names, "publish", "poll", "gaps / executions"):
        table.add_column(name, justify="right")
    for count in threads:
        for delay in delays:
            for rows in (1, 32, 256):
                table.add_row(*gap_row(rows, delay, count, prefix_cache))
    return table


def latency_table() -> Table:
    table = Table(
        title="One 50-token prompt on an idle engine: submit() to its first token in the ring, µs (host's clock)"
    )
    for name in ("idle_sleep_ns", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for sleep in (0, 500, 5000):
        step = TimedStep(0)
        with bench_engine(step, LANES, 4, idle_sleep_ns=sleep) as engine:
            gateway = engine.attach()
            packed = record(PROMPT, max_tokens=1, seed=7)
            taken = []
            for _ in range(3000):
                time.sleep(0.0002)
                head = gateway.client.poll().log_head
                begin = time.perf_counter()
                position = gateway.submit(packed, 0)
                while gateway.client.poll().log_head < head + 2:  # ADMITTED, TOKEN
                    pass
                taken.append(time.perf_counter() - begin)
                while gateway.stream(position).reason is None:
                    gateway.read()
                assert gateway.stream(position).tokens == expected(len(PROMPT), 7, 1)
            table.add_row(str(sleep), *(f"{np.percentile(taken[100:], p) * 1e6:.1f}" for p in (50, 90, 99)))
    return table


def watts() -> str:
    """Mean power and SM clock over SECONDS."""
    query = ["nvidia-smi", "--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits", "-lms", "100"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(SECONDS)
        process.terminate()
        text = process.communicate()[0]
    values = np.array([[float(x) for x in line.split(",")] for line in text.splitlines() if line.count(",") == 1])
    half = values[len(values) // 3 :]  # after the last work's warmth
    return f"{half[:, 0].mean():.0f} W at {half[:, 1].mean():.0f} MHz"


def neighbour() -> Callable[[], dict[str, float]]:
    """Times of work that shares the GPU with the loop: a bf16 product that fills it, and a copy of 1 GiB."""
    torch: Any = importlib.import_module("torch")  # of the machine, only to have something to run

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    stream = torch.cuda.Stream()
    work: dict[str, Callable[[], Any]] = {
        "product": lambda: torch.mm(a, b, out=c),
        "copy": lambda: target.copy_(source),
    }

    def measure() -> dict[str, float]:
        taken = {}
        with torch.cuda.stream(stream):
            for name, call in work.items():
                events = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
                events[0].record()
                for event in events[1:]:
                    call()
                    event.record()
                events[-1].synchronize()
                each = [x.elapsed_time(y) for x, y in itertools.pairwise(events[10:])]
                taken[name] = float(np.median(each)) * 1e3
        return taken

    measure()
    return measure


def idle_table() -> Table:
    table = Table(title="An idle loop beside other work")
    for name in ("loop", "power", "8192³ bf16 product, µs", "1 GiB copy, µs"):
        table.add_column(name, justify="right")
    Device()
    measure = neighbour()
    time.sleep(2.0)
    alone = measure()
    time.sleep(2.0)
    table.add_row("none", watts(), f"{alone['product']:.1f}", f"{alone['copy']:.1f}")
    for sleep in (0, 500, 2000, 20_000):
        step = TimedStep(0)
        with bench_engine(step, LANES, 4, idle_sleep_ns=sleep) as engine:
            run_load(engine, LANES, 4)
            beside = measure()
            time.sleep(1.0)
            table.add_row(f"sleeps {sleep} ns", watts(), f"{beside['product']:.1f}", f"{beside['copy']:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["gap", "latency", "idle"], help="gap, latency, idle")
    parser.add_argument("--threads", type=int, nargs="*", default=[THREADS])
    parser.add_argument("--delays", type=float, nargs="*", default=[300.0], help="shortest step, µs")
    arguments = parser.parse_args()
    console = Console(width=160)
    if "gap" in arguments.parts:
        for prefix_cache in (False, True):
            console.print(gap_table(arguments.delays, arguments.threads, prefix_cache))
    if "latency" in arguments.parts:
        console.print(latency_table())
    if "idle" in arguments.parts:
        console.print(idle_table())


if __name__ == "__main__":
    main()
