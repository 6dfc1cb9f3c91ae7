"""A snapshot as a picture of at most 80 columns."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.cli.top.snapshot import Snapshot

HEALTHY = {"ready", "draining"}
LABEL_WIDTH = 10
BAR_WIDTH = 30
NAMES = {"ttft": "first token", "itl": "between tokens", "tpot": "per token", "e2e": "whole request", "queue": "queue"}


def render(snapshot: Snapshot) -> RenderableType:
    """Facts, latencies, endings and lanes."""
    step = "" if snapshot.step_ms is None else f", a step {snapshot.step_ms:.2f} ms"
    facts = Table.grid(padding=(0, 1))
    facts.add_column(width=LABEL_WIDTH)
    facts.add_column()
    state = Text(snapshot.engine_state, "green" if snapshot.engine_state in HEALTHY else "bold red")
    facts.add_row("engine", Text.assemble(state, f", heartbeat {snapshot.heartbeat_age_s * 1e3:.0f} ms ago{step}"))
    facts.add_row(
        "requests",
        f"{snapshot.running} running, {snapshot.waiting} waiting, {snapshot.open_requests} open at gateways",
    )
    facts.add_row("tokens/s", f"{snapshot.generated_per_s:.1f} generated, {snapshot.prompt_per_s:.1f} prompt")
    bar = Table.grid(padding=(0, 1))
    usage = f"{snapshot.kv_usage:.0%} of {snapshot.kv_pages} pages, {snapshot.preemptions} preemptions"
    bar.add_row(ProgressBar(total=1.0, completed=snapshot.kv_usage, width=BAR_WIDTH), usage)
    facts.add_row("KV cache", bar)
    hits = "-" if snapshot.prefix_hit_rate is None else f"{snapshot.prefix_hit_rate:.0%} of prompt tokens found"
    facts.add_row("prefixes", hits)
    facts.add_row("finished", _counted(snapshot.finished))
    facts.add_row("refused", _counted(snapshot.rejected))
    facts.add_row("losses", Text(_counted(snapshot.engine_losses), "red" if snapshot.engine_losses else ""))
    return Group(facts, Text(), _latencies(snapshot), Text(), _lanes(snapshot))


def _latencies(snapshot: Snapshot) -> Table:
    window = snapshot.latency_window_s
    title = "latency since the start" if window is None else f"latency, last {window:.0f} s"
    table = Table(title, box=None, pad_edge=False)
    for heading in ("p50 ms", "p99 ms", "samples"):
        table.add_column(heading, justify="right")
    for key, latency in snapshot.latency.items():
        table.add_row(NAMES[key], _ms(latency.p50), _ms(latency.p99), str(latency.count))
    return table


def _lanes(snapshot: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("lane", "gateway", "running", "waiting", "tokens", "tokens/s", "log backlog"):
        table.add_column(heading, justify="left" if heading == "gateway" else "right")
    for lane in snapshot.lanes:
        gateway = "attached" if lane.attached else "-"
        counts = (str(lane.running), str(lane.waiting), str(lane.tokens), f"{lane.tokens_per_s:.1f}")
        table.add_row(str(lane.lane), gateway, *counts, str(lane.log_backlog))
    return table


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()) or "none"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
