"""All checks, and how they are shown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from services.cli.doctor import gpu, memory, rdma, system
from services.cli.doctor.finding import Finding, Level
from services.cli.doctor.machine import Machine, Purpose
from services.cli.errors import CommandError

_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.MISSING: "red"}


def purpose_of(transport: str, engine: str, listen: str) -> Purpose:
    """Raises CommandError naming the option that makes no sense."""
    for name, value, known in (("transport", transport, ("shm", "verbs")), ("engine", engine, ("cpu", "cuda", "none"))):
        if value not in known:
            raise CommandError(f"--{name} is {value!r}, must be one of {', '.join(known)}")
    return Purpose(transport, engine, listen)  # type: ignore[arg-type]  # checked above


def examine(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    """Look at everything; nothing is changed, and nothing needs root."""
    yield system.check_kernel(machine, purpose)
    yield rdma.check_pyverbs(machine, purpose)
    yield from rdma.check_devices(machine, purpose)
    yield from rdma.check_bluefield(machine, purpose)
    yield gpu.check_driver(machine, purpose)
    yield gpu.check_gpu_memory(machine, purpose)
    yield memory.check_memlock(machine, purpose)
    yield memory.check_huge_pages(machine, purpose)
    yield system.check_numa(machine, purpose)
    yield system.check_clock(machine, purpose)
    yield system.check_affinity(machine, purpose)
    yield system.check_port(machine, purpose)


def doctor(purpose: Purpose, *, as_json: bool, machine: Machine | None = None) -> None:
    """Print what was found. Raises CommandError when something is missing."""
    findings = list(examine(machine or Machine(), purpose))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    count = Counter(finding.level for finding in findings)[Level.MISSING]
    if count:
        verb = "is" if count == 1 else "are"
        raise CommandError(f"{count} of {len(findings)} checks {verb} MISSING what transport {purpose.transport} needs")


def _show(findings: list[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        level = f"[{_COLOURS[finding.level]}]{finding.level}[/]"
        table.add_row(level, finding.check, finding.found + (f"\n→ {finding.advice}" if finding.advice else ""))
    Console(highlight=False).print(table)
