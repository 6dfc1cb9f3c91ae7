"""What one look at the machine found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    OK = "OK"
    WARN = "WARN"  # it works, worse than it could, or only perhaps
    MISSING = "MISSING"  # it can't work


@dataclass(frozen=True)
class Finding:
    check: str
    level: Level
    found: str  # what is there
    advice: str = ""  # what to do, when the level is not OK


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.WARN, found, advice)


def missing(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.MISSING, found, advice)
