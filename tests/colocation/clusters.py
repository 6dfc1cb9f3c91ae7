"""Clusters as data, for tests of decisions."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from services.colocation.decision.actions import Action, CreateJob, Evict, Fail, Plan, Reason, Release, Resize, Suspend
from services.colocation.decision.model import (
    Cluster,
    Key,
    Node,
    Objectives,
    Outcome,
    Placement,
    Pool,
    Preemption,
    Reading,
    Tenant,
)

START = datetime(2026, 3, 2, 12, tzinfo=UTC)  # a Monday
LIMITS = Objectives(ttft=0.2, tpot=0.05, window=30, recovery=0.8, restore_after=60)
CALM = Reading(0.05, 0.01)
NEAR = Reading(0.19, 0.01)
BROKEN = Reading(0.5, 0.01)


def node(name: str = "n0", cores: int = 16, pool: str = "p", **values: Any) -> Node:
    return replace(Node(name, {"pool": pool}, cores * 1000), **values)


def pool(name: str = "p", selects: str = "p", **values: Any) -> Pool:
    plain = Pool(name, START - timedelta(days=1), {"pool": selects}, baseline_cores=0, reserved_cores=0)
    return replace(plain, **values)


def tenant(name: str, least: int = 1, most: int | None = None, namespace: str = "batch", **values: Any) -> Tenant:
    plain = Tenant(Key(namespace, name), "p", START, least, most or least, has_job=True)
    return replace(plain, **values)


def running(name: str, cores: int, on: str = "n0", least: int = 1, **values: Any) -> Tenant:
    return tenant(name, least, max(cores, least), placement=Placement(on, cores), **values)


def preemptor(name: str, least: int, priority: int = 10) -> Tenant:
    return tenant(name, least, priority=priority, preemption=Preemption.LOWER_PRIORITY)


def apply(cluster: Cluster, plan: Plan, seconds: float = 10, stubborn: bool = False) -> Cluster:
    """The cluster after an obedient one has carried the plan out. ``stubborn``: pods that must end take longer."""
    then = cluster.now + timedelta(seconds=seconds)
    tenants = {each.key: each for each in cluster.tenants}
    leaving: dict[str, int] = {}
    for action in plan.actions:
        tenants[action.key] = _after(tenants[action.key], action, then, stubborn, leaving)
    for key, report in plan.tenants.items():
        tenants[key] = replace(tenants[key], queued=report.queued)
        if report.reason is Reason.NOT_STARTED:
            tenants[key] = replace(tenants[key], not_started=cluster.now)
    pools = tuple(replace(each, guard=plan.pools[each.name].guard) for each in cluster.pools)
    nodes = tuple(replace(each, leaving=leaving.get(each.name, 0)) for each in cluster.nodes)
    return replace(cluster, now=then, tenants=tuple(tenants.values()), pools=pools, nodes=nodes)


def _after(tenant: Tenant, action: Action, then: datetime, stubborn: bool, leaving: dict[str, int]) -> Tenant:
    match action:
        case CreateJob():
            return replace(tenant, has_job=True)
        case Release():
            return replace(tenant, placement=Placement(action.node, action.cores), changed=then)
        case Resize():
            assert tenant.placement is not None
            return replace(tenant, placement=replace(tenant.placement, cores=action.cores), changed=then)
        case Suspend() | Evict() | Fail():
            if tenant.placement is not None and stubborn:
                held = leaving.get(tenant.placement.node, 0)
                leaving[tenant.placement.node] = held + tenant.placement.cores * 1000
            outcome = Outcome.FAILED if isinstance(action, Fail) else None
            return replace(tenant, placement=None, changed=then, outcome=outcome)


def held(cluster: Cluster) -> dict[str, int]:
    """Cores that tenants hold, by node."""
    cores: dict[str, int] = {each.name: 0 for each in cluster.nodes}
    for each in cluster.tenants:
        if each.placement is not None:
            cores[each.placement.node] += each.placement.cores
    return cores
