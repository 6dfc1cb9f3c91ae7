"""A report as a table that people read."""

from __future__ import annotations

from collections.abc import Iterator

from services.cli.bench.report import Latency, Point, Report, Value

HEADINGS = (
    "load",
    "requests",
    "failed",
    "req/s",
    "tokens/s",
    "TTFT p50 / p95 / p99 / p99.9 ms",
    "TPOT p50 / p95 / p99 / p99.9 ms",
    "ITL p50 / p99 / p99.9 ms",
    "end to end p50 / p99 ms",
    "goodput req/s (share)",
    "host CPU µs/token",
    "GPU J/token",
    "late p99 ms",
)
NONE = "-"


def markdown(report: Report) -> str:
    """The table with what one must know to read it. Numbers after ± are halves of 95% confidence intervals."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    served = f"{report.model} at {report.target} by {report.protocol}"
    yield f"**{report.label}**: {served}; {report.workload}; seed {report.seed}."
    yield f"Load generator on CPUs {_cpus(report.cpus)} of {report.machine}; {report.started}, blink {report.blink}."
    yield ""
    yield "| " + " | ".join(HEADINGS) + " |"
    yield "|---" * len(HEADINGS) + "|"
    for point in report.points:
        yield "| " + " | ".join(_cells(point)) + " |"
    yield ""
    if report.slo is not None:
        limits = [("TTFT", report.slo.ttft_ms), ("TPOT", report.slo.tpot_ms)]
        yield "- SLO: " + " and ".join(f"{name} ≤ {limit:g} ms" for name, limit in limits if limit is not None) + "."
    if report.maximum_load is not None:
        yield f"- Maximum serviceable load: {report.maximum_load:.3g} requests/s."
    if (beside := report.points[0].interference) is not None:
        rates = (beside.copy_gb_per_s, beside.update_gb_per_s, beside.walk_gb_per_s)
        moved = ", ".join(f"{kind} {rate:.1f}" for kind, rate in zip(("copy", "update", "walk"), rates, strict=True))
        yield f"- Beside {beside.count} neighbours on CPUs {_cpus(beside.cpus)}, which moved {moved} GB/s."
    for point in report.points:
        if not point.client.ok:
            yield f"- **Do not trust load {point.load:g}: the load generator was too slow.** {_slowness(point)}"
    for note in report.notes:
        yield f"- {note}"


def _cells(point: Point) -> list[str]:
    good, share = point.goodput_requests_per_s, point.slo_share
    return [
        f"{point.load:g}",
        str(point.requests),
        ", ".join(f"{count} {error}" for error, count in point.failed.items()) or "0",
        _number(point.requests_per_s, 4),
        _number(point.output_tokens_per_s, 4),
        _percentiles(point.ttft_ms, "p50", "p95", "p99", "p999"),
        _percentiles(point.tpot_ms, "p50", "p95", "p99", "p999"),
        _percentiles(point.itl_ms, "p50", "p99", "p999"),
        _percentiles(point.end_to_end_ms, "p50", "p99"),
        f"{_number(good, 4)} ({share.mean:.1%})" if good and share else NONE,
        _number(point.host_cpu_us_per_token, 3),
        _number(point.gpu_joules_per_token, 3),
        f"{point.client.lateness_p99_ms:.1f}" + ("" if point.client.ok else " **!**"),
    ]


def _percentiles(latency: Latency | None, *names: str) -> str:
    return " / ".join(_number(getattr(latency, name), 3) for name in names) if latency else NONE


def _number(value: Value | None, digits: int) -> str:
    if value is None:
        return NONE
    text = f"{value.mean:.{digits}g}" if abs(value.mean) < 10**digits else f"{value.mean:.0f}"
    return text if value.high is None else f"{text} ±{value.high - value.mean:.2g}"


def _slowness(point: Point) -> str:
    client = point.client
    return (
        f"It sent {client.lateness_p99_ms:.1f} ms late (p99) and read {client.loop_delay_p99_ms:.1f} ms late, its "
        f"busiest process used {client.busy_max:.0%} of a core: more --processes, or CPUs of its own (--cpus)."
    )


def _cpus(cpus: list[int]) -> str:
    return ",".join(map(str, cpus))
