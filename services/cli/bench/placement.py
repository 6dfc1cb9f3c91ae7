"""Which CPUs the load generator and the neighbours get: never the same."""

from __future__ import annotations

import os
from dataclasses import dataclass

from services.cli.errors import CommandError
from services.common.cpu import parse_cpus


@dataclass(frozen=True)
class Placement:
    cpus: frozenset[int]  # of the load generator
    neighbours: frozenset[int]
    processes: int  # of the load generator


def place(cpus: str | None, neighbour_cpus: str | None, interfere: int, processes: int | None) -> Placement:
    """Check and complete what was asked for. Raises CommandError."""
    allowed = frozenset(os.sched_getaffinity(0))
    own = _within("--cpus", cpus, allowed)
    if not interfere:
        return Placement(own, frozenset(), processes or _processes(own))
    if cpus is None:
        raise CommandError("--interfere needs --cpus: CPUs of the load generator that neighbours keep away from")
    theirs = _within("--interfere-cpus", neighbour_cpus, allowed - own)
    if not theirs:
        raise CommandError(f"--cpus {cpus} leaves no CPU for neighbours, of {sorted(allowed)}")
    return Placement(own, theirs, processes or _processes(own))


def _within(option: str, text: str | None, allowed: frozenset[int]) -> frozenset[int]:
    if text is None:
        return allowed
    try:
        chosen = parse_cpus(text)
    except ValueError as error:
        raise CommandError(f"{option} is {text!r}, must be CPUs such as 0-3,8: {error}") from error
    if not chosen <= allowed:
        raise CommandError(f"{option}: CPUs {sorted(chosen - allowed)} cannot be used, these can: {sorted(allowed)}")
    return chosen


def _processes(cpus: frozenset[int]) -> int:
    return max(1, len(cpus) // 2)
