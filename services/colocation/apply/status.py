"""Statuses of TenantPools and Tenants, and what has to be written to bring one there."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from services.colocation.decision.actions import Phase, PoolReport, Reason, TenantReport
from services.colocation.decision.messages import slo
from services.colocation.decision.model import Pool, Stage
from services.colocation.observe.objects import Object, timestamp

NODES_SHOWN = 100
POSITIONS_SHOWN = 20  # beyond, a place in the queue would be rewritten for everybody with every release
CONFLICTS_NAMED = 5

Json = dict[str, Any]


def tenant_status(thing: Object, report: TenantReport, now: datetime, moved: bool) -> Json:
    """The whole status; ``moved``: its placement changes now."""
    before = thing.get("status") or {}
    placed = report.phase is Phase.RUNNING
    reason = (report.reason or report.phase).value
    not_started = report.reason in {Reason.NOT_STARTED, Reason.REFUSED}
    return {
        "observedGeneration": thing["metadata"]["generation"],
        "phase": report.phase.value,
        "node": report.node or None,
        "cores": report.cores or None,
        "position": report.position if 0 < report.position <= POSITIONS_SHOWN else None,
        "message": report.message,
        "queuedAt": timestamp(report.queued) or before.get("queuedAt"),
        "changedAt": timestamp(now) if moved else before.get("changedAt"),
        "notStartedAt": timestamp(now) if not_started else before.get("notStartedAt"),
        "notStartedWhy": report.message if not_started else before.get("notStartedWhy"),
        "conditions": _conditions(thing, [("Admitted", placed, reason, report.message)], now),
    }


def pool_status(thing: Object, pool: Pool, report: PoolReport, scrape_error: str, now: datetime) -> Json:
    """The whole status."""
    metrics = scrape_error or ("read" if pool.objectives else "no SLO guard")
    lost = sorted(report.conflicts)
    named = ", ".join(f"{name} (of {report.conflicts[name]!r})" for name in lost[:CONFLICTS_NAMED])
    more = f" and {len(lost) - CONFLICTS_NAMED} more" if len(lost) > CONFLICTS_NAMED else ""
    has_nodes = bool(report.freed)
    stage = report.guard.stage
    shown = sorted(report.freed, key=lambda name: (-report.freed[name], name))[:NODES_SHOWN]
    kinds = [
        ("Ready", False, "Invalid", pool.invalid)
        if pool.invalid
        else ("Ready", has_nodes, "HasNodes" if has_nodes else "NoNodes", f"{len(report.freed)} nodes"),
        (
            "Conflicted",
            bool(lost),
            "NodesOfAnotherPool" if lost else "NoConflict",
            f"{named}{more}" if lost else "no other pool has its nodes",
        ),
        ("MetricsAvailable", not scrape_error, "Unreadable" if scrape_error else "Read", metrics),
        ("SLOHealthy", stage is Stage.NORMAL, stage.value, f"stage {stage.value}"),
        ("Open", report.open, "Open" if report.open else "Closed", "inside its windows" if report.open else "outside"),
    ]
    return {
        "observedGeneration": thing["metadata"]["generation"],
        "nodes": len(report.freed),
        "freedCores": sum(report.freed.values()),
        "usedCores": sum(report.used.values()),
        "waiting": report.waiting,
        "slo": slo(pool),
        "guard": {
            "stage": stage.value,
            "since": timestamp(report.guard.since, "microseconds"),
            "calmSince": timestamp(report.guard.calm_since, "microseconds"),
        },
        "byNode": [{"name": n, "freedCores": report.freed[n], "usedCores": report.used[n]} for n in shown],
        "conditions": _conditions(thing, kinds, now),
    }


def differs(thing: Object, status: Json) -> bool:
    """Whether writing ``status`` would change anything; None is what is not there."""
    return bool(_without_none(thing.get("status") or {}) != _without_none(status))


def _conditions(thing: Object, wanted: list[tuple[str, bool, str, str]], now: datetime) -> list[Json]:
    before = {each["type"]: each for each in (thing.get("status") or {}).get("conditions") or ()}
    made = []
    for kind, holds, reason, message in wanted:
        status = "True" if holds else "False"
        old = before.get(kind, {})
        since = old.get("lastTransitionTime") if old.get("status") == status else None
        made.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": since or timestamp(now),
                "observedGeneration": thing["metadata"]["generation"],
            }
        )
    return made


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value
