"""A report's plots, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.cli.bench.report import Latency, Point, Report, Value

LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL"}


def plot(report: Report, folder: Path) -> list[Path]:
    """Write PNGs over the load: a latency each, throughput; their paths. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

    points = sorted(report.points, key=lambda point: point.load)
    written = []

    def save(name: str, unit: str, series: dict[str, list[Value | None]]) -> None:
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for label, values in series.items():
            known = [(point.load, value) for point, value in zip(points, values, strict=True) if value is not None]
            if known:
                axes.errorbar(
                    [load for load, _ in known],
                    [value.mean for _, value in known],
                    [0.0 if value.high is None else value.high - value.mean for _, value in known],
                    marker="o",
                    capsize=3,
                    label=label,
                )
        axes.set(xlabel="offered load", ylabel=unit, title=report.label, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=150)
        written.append(path)

    for field, name in LATENCIES.items():
        latencies: list[Latency | None] = [getattr(point, field) for point in points]
        save(field.removesuffix("_ms"), f"{name}, ms", _percentiles(latencies))
    answered: list[Value | None] = [point.requests_per_s for point in points]
    throughput = {"answered": answered, "goodput": _goodput(points)}
    save("throughput", "requests/s", throughput)
    return written


def _percentiles(latencies: Sequence[Latency | None]) -> dict[str, list[Value | None]]:
    return {
        name: [getattr(latency, name) if latency else None for latency in latencies] for name in ("p50", "p95", "p99")
    }


def _goodput(points: Sequence[Point]) -> list[Value | None]:
    return [point.goodput_requests_per_s for point in points]
