"""What several runs of the soak come to together: one line of JSON for each in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class Audited:
    """What one run has come to; a run that stopped at a fault counts its load, and the fault.

    Attributes:
        seconds: of load.
        heartbeat: the greatest age seen, in seconds.
        fault: "" for none.
    """

    commit: str
    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    heartbeat: float = 0.0
    fault: str = ""


def append(file: Path, audited: Audited) -> str:
    """Add a line; returns what all of its commit come to."""
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(audited)) + "\n")
    runs = [Audited(**json.loads(line)) for line in file.read_text().splitlines()]
    runs = [run for run in runs if run.commit == audited.commit]
    seconds, requests, tokens = (sum(getattr(run, name) for run in runs) for name in ("seconds", "requests", "tokens"))
    faults, oldest = sum(bool(run.fault) for run in runs), max(run.heartbeat for run in runs)
    return (
        f"commit {audited.commit}: {seconds:,.0f} s of load in {len(runs)} runs, {requests:,} requests, {tokens:,}"
        f" tokens, {faults} faults, oldest heartbeat {oldest * 1e3:.1f} ms"
    )
