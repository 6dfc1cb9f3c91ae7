"""``blink bench``: measures a server at one load after the other and writes what it found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from services.cli.bench.conditions import Conditions
from services.cli.bench.fleet import Fleet, fleet
from services.cli.bench.markdown import markdown
from services.cli.bench.measure import Repeat, summarize
from services.cli.bench.neighbours import Neighbours, neighbours
from services.cli.bench.plots import plot
from services.cli.bench.report import Point, Report, Slo
from services.cli.bench.search import highest_rate
from services.cli.bench.target import Target
from services.cli.bench.workload import Workload
from services.cli.errors import CommandError, StoppedError
from services.common.cpu import cpu_name, on_cpus

WARM_UP_SEED = 1 << 40  # far from the seeds of repeats
JSON_NAME, MARKDOWN_NAME = "bench.json", "bench.md"


@dataclass(frozen=True)
class Plan:
    """What is to be measured, and how."""

    target: Target
    workload: Workload
    workload_words: str
    loads: Sequence[float]
    repeats: int
    warm_up: float  # seconds of the first load, not measured
    seed: int
    slo: Slo | None
    search: bool
    slo_goal: float  # share of requests that must keep the SLO at a serviceable load
    precision: float  # of the maximum load, a share
    processes: int
    cpus: frozenset[int]
    max_lateness: float  # seconds
    pids: tuple[int, ...]
    gpus: tuple[int, ...]
    interfere: int
    interfere_cpus: frozenset[int]
    label: str
    output: Path | None


def bench(plan: Plan) -> None:
    """Run the command. Raises CommandError; an interrupt leaves no process behind."""
    say = narrator()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    conditions = Conditions(plan.target.address, plan.pids, plan.gpus, beside_neighbours=plan.interfere > 0)
    try:
        with (
            on_cpus(plan.cpus),
            _neighbours(plan) as beside,
            fleet(plan.processes, plan.target) as processes,
        ):
            run = _Run(plan, processes, conditions, beside, say)
            run.warm_up()
            points = [run.point(load, plan.repeats) for load in plan.loads]
            maximum = run.search() if plan.search else None
            points += run.found(maximum, points)
    except KeyboardInterrupt:
        raise StoppedError("stopped, nothing was written") from None
    report = Report(
        schema="blink-bench/1",
        blink=version("blink"),
        started=started,
        label=plan.label or plan.target.model,
        target=plan.target.address,
        protocol=plan.target.protocol.value,
        model=plan.target.model,
        workload=plan.workload_words,
        seed=plan.seed,
        slo=plan.slo,
        machine=f"{cpu_name()}, {os.cpu_count()} CPUs" + "".join(f", {name}" for name in conditions.gpus),
        cpus=sorted(plan.cpus),
        notes=conditions.notes,
        points=points,
        maximum_load=maximum,
    )
    table = markdown(report)
    if plan.output is not None:
        _write(report, table, plan.output, say)
    print(table)


def narrator() -> Callable[[str], None]:
    """Prints lines of progress as they are, brackets too."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print


class _Run:
    """Everything that is up while points are measured."""

    def __init__(
        self,
        plan: Plan,
        processes: Fleet,
        conditions: Conditions,
        beside: Neighbours | None,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._fleet, self._conditions = plan, processes, conditions
        self._beside, self._say = beside, say
        self._searched: dict[float, Point] = {}

    def warm_up(self) -> None:
        """The beginning of the first load, over its seconds or until all of it has been sent."""
        if not self._plan.warm_up:
            return
        requests = self._plan.workload.requests(self._plan.loads[0], self._plan.seed + WARM_UP_SEED)
        first = [request for request in requests if request.at < self._plan.warm_up] or requests[:1]
        self._say(f"warm-up: {len(first)} requests")
        self._fleet.run(first)

    def point(self, load: float, repeats: int) -> Point:
        """Measure one load. Raises CommandError when it has no requests or none is answered."""
        done = []
        with self._conditions.interference(self._beside, self._plan.interfere_cpus) as interference:
            for number in range(repeats):
                requests = self._plan.workload.requests(load, self._plan.seed + number)
                if not requests:
                    raise CommandError(f"load {load:g} has no request in the time that was given: more --seconds")
                with self._conditions.account() as account:
                    shares = self._fleet.run(requests)
                cpu = sum(share.cpu_seconds for share in shares)
                done.append(Repeat(shares, account.host_cpu_seconds(cpu), account.gpu_joules))
        point = summarize(load, done, self._plan.slo, self._plan.max_lateness, interference.seen)
        if point.ttft_ms is None:
            raise CommandError(f"load {load:g}: no request was answered: {point.failed}")
        late = "" if point.client.ok else ", THE LOAD GENERATOR WAS TOO SLOW"
        self._say(
            f"load {load:g}: {point.requests} requests, TTFT p50 {point.ttft_ms.p50.mean:.1f} ms, "
            f"p99 {point.ttft_ms.p99.mean:.1f} ms{late}"
        )
        return point

    def search(self) -> float | None:
        """The highest rate at which nothing fails and enough requests keep the SLO."""

        def serves(rate: float) -> bool:
            point = self.point(rate, 1)
            if not point.client.ok:
                raise CommandError(f"the load generator is too slow for {rate:g} requests/s: more --processes or CPUs")
            return not point.failed and point.slo_share is not None and point.slo_share.mean >= self._plan.slo_goal

        return highest_rate(serves, self._plan.loads[0], self._plan.precision)

    def found(self, maximum: float | None, points: Sequence[Point]) -> list[Point]:
        """The load that the search found, measured as the others are."""
        if maximum is None or any(point.load == maximum for point in points):
            return []
        return [self.point(maximum, self._plan.repeats)]


@contextmanager
def _neighbours(plan: Plan) -> Iterator[Neighbours | None]:
    if not plan.interfere:
        yield None
        return
    try:
        with neighbours(plan.interfere, plan.interfere_cpus) as running:
            yield running
    except RuntimeError as error:
        raise CommandError(str(error)) from error


def _write(report: Report, table: str, folder: Path, say: Callable[[str], None]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JSON_NAME).write_text(report.model_dump_json(indent=2, by_alias=True) + "\n")
        (folder / MARKDOWN_NAME).write_text(table)
    except OSError as error:
        raise CommandError(f"--output {folder}: {error.strerror}") from error
    try:
        plots = [path.name for path in plot(report, folder)]
    except ImportError:
        plots = []
        say("no plots: matplotlib is not installed (pip install '.[bench]' in Blink's checkout)")
    say(f"written to {folder}: {', '.join([JSON_NAME, MARKDOWN_NAME, *plots])}")
