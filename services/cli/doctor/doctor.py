"""All checks, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape

from services.cli.doctor import gpu, libraries, memory, ports, rdma, system
from services.cli.doctor.finding import Finding, Level
from services.cli.doctor.machine import Machine, Purpose
from services.cli.errors import CommandError
from services.cli.program import DEFAULT_ADDRESS, DEFAULT_HTTP_ADDRESS

_LEVEL_WIDTH = max(map(len, Level))
_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.MISSING: "red"}


def purpose_of(transport: str, engine: str, listen: str = "", http: str = "") -> Purpose:
    """Without ``listen`` and ``http`` the gateway's defaults, where there is one.

    Raises CommandError naming an option that makes no sense.
    """
    for name, value, known in (("transport", transport, ("shm", "verbs")), ("engine", engine, ("cpu", "cuda", "none"))):
        if value not in known:
            raise CommandError(f"--{name} is {value!r}, must be one of {', '.join(known)}")
    if transport == "shm" or engine == "none":
        listen, http = listen or DEFAULT_ADDRESS, http or DEFAULT_HTTP_ADDRESS
    return Purpose(transport, engine, listen, http)  # type: ignore[arg-type]  # checked above


def examine(machine: Machine, purpose: Purpose) -> Iterator[Finding]:
    """Look at everything; nothing is changed, and nothing needs root."""
    yield system.check_kernel(machine, purpose)
    yield rdma.check_pyverbs(machine, purpose)
    yield libraries.check_rdma_core(machine, purpose)
    yield from rdma.check_devices(machine, purpose)
    yield from rdma.check_bluefield(machine, purpose)
    yield gpu.check_driver(machine, purpose)
    yield gpu.check_gpu_memory(machine, purpose)
    yield gpu.check_iommu(machine, purpose)
    yield memory.check_memlock(machine, purpose)
    yield memory.check_huge_pages(machine, purpose)
    yield system.check_numa(machine, purpose)
    yield system.check_clock(machine, purpose)
    yield system.check_affinity(machine, purpose)
    yield from ports.check_ports(machine, purpose)


def doctor(purpose: Purpose, *, as_json: bool, machine: Machine | None = None) -> None:
    """Print what was found. Raises CommandError when something is missing."""
    findings = list(examine(machine or Machine(), purpose))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    lacking = [finding for finding in findings if finding.level is Level.MISSING]
    if lacking:
        raise CommandError(
            f"{len(lacking)} of {len(findings)} checks found something MISSING for transport {purpose.transport} with "
            f"engine {purpose.engine}. Next, for {lacking[0].check}: {lacking[0].advice}"
        )


def _show(findings: list[Finding]) -> None:
    """Long lines are left whole, as they have commands to be copied."""
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        level = f"[{_COLOURS[finding.level]}]{finding.level:<{_LEVEL_WIDTH}}[/]"
        console.print(f"{level}  {finding.check:<{width}}  {escape(finding.found)}")
        if finding.advice:
            console.print(f"{'':<{_LEVEL_WIDTH}}  {'':<{width}}  → {escape(finding.advice)}")
