"""The tables of bench.served: what was measured beside what is to be reached, and what speaks against believing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.served_scrapes import Streamed
from services.cli.bench.report import Interference, Latency, Point


@dataclass(frozen=True)
class Figures:
    """TTFT p50 and p99, TPOT p99, all in ms."""

    ttft_p50: float
    ttft_p99: float
    tpot_p99: float

    def __str__(self) -> str:
        first, late, each = (f"{value:.3g}" if value < 999.5 else f"{value:.0f}" for value in self._values)
        return f"{first} / {late}, {each}"

    @property
    def _values(self) -> tuple[float, float, float]:
        return self.ttft_p50, self.ttft_p99, self.tpot_p99

    def within(self, limit: Figures) -> bool:
        return all(value <= most for value, most in zip(self._values, limit._values, strict=True))


@dataclass(frozen=True)
class Reference:
    """vLLM 0.26 on one H200 with 16 cores at Llama-3-8B's geometry, alone and beside 48 neighbours on all cores; what
    Blink is to reach in either case."""

    alone: Figures
    beside: Figures
    target: Figures


REFERENCE_GEOMETRY = "llama3-8b"
REFERENCES = {
    4.0: Reference(Figures(23.6, 42.4, 5.42), Figures(100, 211, 21.8), Figures(7, 12, 4.3)),
    16.0: Reference(Figures(29.4, 60.6, 7.61), Figures(133, 294, 46.9), Figures(9, 18, 6.0)),
    32.0: Reference(Figures(46.5, 85.8, 12.3), Figures(242, 3066, 82.8), Figures(12, 25, 9.0)),
}
HTTP_ADDS_MS, SCRAPE_MS = 0.3, 5.0
HEADINGS = (
    "offered req/s",
    "neighbours",
    "requests",
    "failed",
    "TTFT p50 / p99, TPOT p99 ms",
    "to reach",
    "reached",
    "vLLM 0.26",
    "TTFT, TPOT p99 over those without neighbours",
    "tokens/s",
    "host CPU µs/token",
    "late p99 ms",
)


@dataclass(frozen=True)
class Row:
    """One point of the matrix. ``expected_tokens`` are those of all its outputs, as they were drawn."""

    point: Point
    expected_tokens: int

    @property
    def neighbours(self) -> int:
        return self.point.interference.count if self.point.interference else 0

    @property
    def figures(self) -> Figures | None:
        """None where nothing was answered."""
        ttft, tpot = self.point.ttft_ms, self.point.tpot_ms
        return Figures(ttft.p50.mean, _p99(ttft), _p99(tpot)) if ttft and tpot else None

    def faults(self) -> Iterator[str]:
        """Why the row is not what it says."""
        point, name = self.point, f"{self.point.load:g} req/s beside {self.neighbours} neighbours"
        if point.failed:
            yield f"{name}: failed {', '.join(f'{count} {error}' for error, count in point.failed.items())}"
        elif point.output_tokens != self.expected_tokens:
            yield f"{name}: {point.output_tokens} tokens came, {self.expected_tokens} were asked for"
        if not point.client.ok:
            yield (
                f"{name}: the load generator was too slow: sent {point.client.lateness_p99_ms:.1f} ms late (p99), read "
                f"{point.client.loop_delay_p99_ms:.1f} ms late, busiest process {point.client.busy_max:.0%} of a core"
            )


def matrix(rows: Sequence[Row], references: Mapping[float, Reference]) -> Iterator[str]:
    """Lines of the table of loads, beside the references of their rates."""
    yield "| " + " | ".join(HEADINGS) + " |"
    yield "|---" * len(HEADINGS) + "|"
    for row in sorted(rows, key=lambda row: (row.point.load, row.neighbours)):
        calm = next((other for other in rows if other.point.load == row.point.load and not other.neighbours), None)
        yield "| " + " | ".join(_cells(row, calm, references.get(row.point.load))) + " |"


def around(added_ms: Sequence[float], streams: int, runs: Sequence[Streamed]) -> Iterator[str]:
    """Lines of the table of what lies around the stream, those that were measured.

    ``added_ms`` is p10, p50 and p90; ``runs`` of streams without scrapes, then with them.
    """
    yield "| what | measured | to reach |"
    yield "|---|---|---|"
    if added_ms:
        low, middle, high = added_ms
        yield (
            "| first token of a chat by HTTP less by gRPC, in turns, p50 (p10, p90) ms "
            f"| {middle:.2f} ({low:.2f}, {high:.2f}) | {HTTP_ADDS_MS:g} |"
        )
    if runs:
        calm, scraped = runs
        times = sorted(scraped.scrapes)
        measured = f"{times[len(times) // 2] * 1e3:.1f} / {times[-1] * 1e3:.1f} of {len(times)}" if times else "none"
        yield f"| scrape of /metrics at {streams} streams, p50 / longest ms | {measured} | {SCRAPE_MS:g} |"
        yield (
            "| tokens of a stream apart, p99 ms: with scrapes / without "
            f"| {scraped.gap * 1e3:.1f} / {calm.gap * 1e3:.1f} | alike |"
        )


def faults_of_streams(streams: int, runs: Sequence[Streamed]) -> Iterator[str]:
    """Why the lines of streams are not what they say; ``runs`` as for ``around``."""
    for name, run in zip(("without scrapes", "with scrapes"), runs, strict=False):
        if run.failed:
            yield f"{streams} streams {name}: {run.failed}"
    if runs and not runs[-1].scrapes:
        yield f"no scrape found {streams} streams open"


def _cells(row: Row, calm: Row | None, reference: Reference | None) -> list[str]:
    point, figures, cpu = row.point, row.figures, row.point.host_cpu_us_per_token
    ratios = "-"
    if figures and row.neighbours and calm and calm.figures:
        before = calm.figures
        ratios = f"{figures.ttft_p99 / before.ttft_p99:.2f}, {figures.tpot_p99 / before.tpot_p99:.2f}"
    return [
        f"{point.load:g}",
        _moved(point.interference),
        str(point.requests),
        str(sum(point.failed.values())),
        str(figures or "-"),
        f"≤ {reference.target}" if reference else "-",
        ("yes" if figures.within(reference.target) else "no") if reference and figures else "-",
        str(reference.beside if row.neighbours else reference.alone) if reference else "-",
        ratios,
        f"{point.output_tokens_per_s.mean:,.0f}",
        f"{cpu.mean:.3g}" if cpu else "-",
        f"{point.client.lateness_p99_ms:.1f}" + ("" if point.client.ok else " **!**"),
    ]


def _moved(beside: Interference | None) -> str:
    if beside is None:
        return "none"
    moved = sum((beside.copy_gb_per_s, beside.update_gb_per_s, beside.walk_gb_per_s))
    return f"{beside.count}, {moved:.0f} GB/s"


def _p99(latency: Latency) -> float:
    return latency.p99.mean
