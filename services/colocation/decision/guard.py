"""The SLO guard: how far tenants must give way, from what requests have seen.

It goes one stage further when a limit is passed and the last stage has had a whole window to show its effect, and one
stage back when every figure has stayed calm, well below its limit, for ``restore_after``. Between calm and limit it
stays where it is, so it can't flap around a limit.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from enum import Enum

from services.colocation.decision.model import Guard, Objectives, Reading, Stage

STAGES = tuple(Stage)


class Verdict(Enum):
    """What one reading says."""

    CALM = "calm"
    NEAR = "near"  # neither calm nor broken
    BROKEN = "broken"
    UNKNOWN = "unknown"  # the metrics can't be read


def judge(objectives: Objectives | None, reading: Reading | None) -> Verdict:
    """Compare a reading with the limits. No limits is calm, and so is a window in which nothing was asked.

    That some gateways pass a limit is enough to know that it is passed, that they do not is not.
    """
    if objectives is None:
        return Verdict.CALM
    if reading is None:
        return Verdict.UNKNOWN
    shares = [
        seen / limit
        for seen, limit in ((reading.ttft, objectives.ttft), (reading.tpot, objectives.tpot))
        if seen is not None and limit is not None
    ]
    worst = max(shares, default=0.0)
    if worst > 1.0:
        return Verdict.BROKEN
    if reading.partial:
        return Verdict.UNKNOWN
    return Verdict.CALM if worst <= objectives.recovery else Verdict.NEAR


def advance(guard: Guard, objectives: Objectives | None, verdict: Verdict, now: datetime) -> Guard:
    """The guard after one more look."""
    if objectives is None:
        return Guard()
    here = STAGES.index(guard.stage)
    if verdict is Verdict.BROKEN:
        settled = guard.since is None or now - guard.since >= timedelta(seconds=objectives.window)
        if here + 1 < len(STAGES) and (guard.stage is Stage.NORMAL or settled):
            return Guard(STAGES[here + 1], now)
        return replace(guard, calm_since=None)
    if verdict is not Verdict.CALM:
        return replace(guard, calm_since=None)
    calm_since = guard.calm_since or now
    if here and now - calm_since >= timedelta(seconds=objectives.restore_after):
        return Guard(STAGES[here - 1], now, now)
    return replace(guard, calm_since=calm_since)


def usable(freed: int, stage: Stage) -> int:
    """Cores of a node that tenants may hold at this stage, of the ``freed`` ones."""
    if stage in {Stage.NORMAL, Stage.SHRINK}:
        return freed
    return freed // 2 if stage is Stage.SUSPEND_HALF else 0
