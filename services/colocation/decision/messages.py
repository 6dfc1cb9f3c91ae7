"""The sentences that events and conditions say."""

from __future__ import annotations

from datetime import datetime

from services.colocation.decision.actions import Reason
from services.colocation.decision.model import Guard, Pool, Reading, Tenant

_SENTENCES = {
    Reason.RUNNING: "runs on {node} with {cores} cores",
    Reason.KUEUE_HOLDS: "{cores} cores of {node} are kept for it: its queue in Kueue has not admitted it",
    Reason.RELEASED: "released on {node} with {cores} cores",
    Reason.GROWN: "cores were free on {node}: it has {cores} now",
    Reason.SHRUNK_FOR_ROOM: "another tenant, or serving, needs cores of {node}: it has {cores} now",
    Reason.SHRUNK_FOR_SLO: "the SLO is in danger ({slo}): it has {cores} cores now",
    Reason.SUSPENDED_FOR_SLO: "the SLO is in danger ({slo}), stage {stage}: suspended, it keeps its place in the queue",
    Reason.EVICTED_FOR_SLO: "the SLO is in danger ({slo}), stage {stage}: evicted, it goes to the queue's end",
    Reason.PREEMPTED: "a tenant of higher priority takes its place",
    Reason.NO_ROOM: "no node of TenantPool {pool} has room for {least} cores",
    Reason.TOO_LARGE: "it needs {least} cores, but the largest node of TenantPool {pool} frees {largest}",
    Reason.NO_SUITABLE_NODE: (
        "no node of TenantPool {pool} that frees {least} cores has the labels of its nodeSelector and no taint that it "
        "does not tolerate"
    ),
    Reason.TOO_MUCH_BANDWIDTH: (
        "it declares {bandwidth} MB/s of memory bandwidth for {least} cores, "
        "but TenantPool {pool} lets the tenants of a node have {most_bandwidth}"
    ),
    Reason.BEHIND_RESERVATION: "the node that would take it is kept for a tenant that is further ahead",
    Reason.WINDOW_CLOSED: "TenantPool {pool} is outside its schedule windows",
    Reason.GUARD_HOLDS: "the SLO guard of TenantPool {pool} lets nobody in: stage {stage}",
    Reason.POOL_DELETED: "TenantPool {pool} is being deleted",
    Reason.NODE_LOST: "its node is gone from TenantPool {pool}, or takes no pods",
    Reason.NOT_STARTED: "its pod was given cores and did not start: {why}",
    Reason.TRIED_LATER: "it could not be started ({why}): others go first until {until}",
    Reason.INVALID: "it can't be followed: {invalid}",
    Reason.POOL_INVALID: "TenantPool {pool} can't be followed: {pool_invalid}",
    Reason.RANGE_CHANGED: "it asks for {least} to {most} cores now: it has {cores} on {node}",
    Reason.CORES_RECLAIMED: "serving, or pods that are no tenants, need the cores",
}


def explain(
    reason: Reason,
    tenant: Tenant,
    pool: Pool,
    guard: Guard,
    *,
    largest: int = 0,
    cores: int = 0,
    node: str = "",
    until: datetime | None = None,
) -> str:
    """Why, in one sentence with the figures that decided it."""
    return _SENTENCES[reason].format(
        node=node,
        cores=cores,
        least=tenant.min_cores,
        most=tenant.max_cores,
        largest=largest,
        bandwidth=tenant.least_bandwidth,
        most_bandwidth=pool.bandwidth,
        pool=pool.name,
        stage=guard.stage,
        slo=slo(pool),
        why=tenant.not_started_why if reason is Reason.TRIED_LATER else tenant.pending_why,
        invalid=tenant.invalid,
        pool_invalid=pool.invalid,
        until=until and until.isoformat(timespec="seconds"),
    )


def slo(pool: Pool) -> str:
    """P99 of first and further tokens beside their limits, in milliseconds."""
    if pool.objectives is None:
        return "no limits"
    if pool.reading is None:
        return "the gateways' metrics can't be read"
    seen = _share("TTFT", pool.reading, pool.objectives.ttft), _share("TPOT", pool.reading, pool.objectives.tpot)
    return ", ".join(text for text in seen if text)


def _share(name: str, reading: Reading, limit: float | None) -> str:
    if limit is None:
        return ""
    seen = reading.ttft if name == "TTFT" else reading.tpot
    figure = "none" if seen is None else f"{seen * 1000:.1f} ms"
    return f"P99 {name} {figure} of {limit * 1000:g} ms"
