"""From one moment of a cluster to what is to be done about it. The same moment always gives the same plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from services.colocation.decision.actions import (
    Action,
    CreateJob,
    Evict,
    Fail,
    Phase,
    Plan,
    PoolReport,
    Reason,
    Release,
    Resize,
    Suspend,
    TenantReport,
)
from services.colocation.decision.admission import Admission
from services.colocation.decision.capacity import Claims, claim, freed_cores
from services.colocation.decision.guard import Verdict, advance, judge, usable
from services.colocation.decision.ledger import Grant, NodeCores, PoolCores
from services.colocation.decision.messages import explain
from services.colocation.decision.model import MILLI, Cluster, Key, Node, Outcome, Pool, Stage, Tenant
from services.colocation.decision.windows import is_open

# Those who gave way to serving keep their place in the queue; those who were evicted or preempted, or who held cores
# and could not start, go to its end.
_LOSES_PLACE = {Reason.PREEMPTED, Reason.EVICTED_FOR_SLO, Reason.NOT_STARTED}


def decide(cluster: Cluster) -> Plan:
    """The plan for this moment. Objects that contradict each other end in conditions, never in an exception."""
    actions: list[Action] = []
    reports: dict[Key, TenantReport] = {}
    by_pool: dict[str, list[Tenant]] = defaultdict(list)
    pools = {pool.name: pool for pool in cluster.pools}
    for tenant in cluster.tenants:
        if tenant.outcome is not None:
            phase = Phase.SUCCEEDED if tenant.outcome is Outcome.SUCCEEDED else Phase.FAILED
            why = f": {tenant.outcome_why}" if tenant.outcome_why else ""
            reports[tenant.key] = TenantReport(phase, None, f"the Job has {tenant.outcome.lower()}{why}")
        elif tenant.deadline is not None and cluster.now >= tenant.deadline:
            text = f"it had not ended by its deadline, {tenant.deadline.isoformat(timespec='seconds')}"
            actions.append(Fail(tenant.key, Reason.DEADLINE_EXCEEDED, text))
            reports[tenant.key] = TenantReport(Phase.FAILED, Reason.DEADLINE_EXCEEDED, text)
        elif tenant.pool in pools:
            by_pool[tenant.pool].append(tenant)
        else:
            text = f"there is no TenantPool {tenant.pool!r}"
            if tenant.placement is not None:
                actions.append(Suspend(tenant.key, Reason.NO_POOL, text))
            reports[tenant.key] = TenantReport(Phase.WAITING, Reason.NO_POOL, text, queued=tenant.waiting_since)
        if not tenant.has_job and tenant.key not in reports and cluster.tried_again(tenant) is None:
            actions.append(CreateJob(tenant.key, Reason.QUEUED, f"queued in TenantPool {tenant.pool!r}"))
    claims = claim(cluster.nodes, cluster.pools)
    ending = _ending(cluster, claims, by_pool)
    pool_reports = {}
    for pool in cluster.pools:
        owned = [replace(each, leaving=each.leaving + ending[each.name]) for each in claims.owned[pool.name]]
        round_ = _PoolRound(cluster, pool, owned, by_pool[pool.name])
        actions += round_.actions
        reports |= round_.reports
        pool_reports[pool.name] = PoolReport(
            guard=round_.guard,
            freed={name: each.capacity for name, each in round_.cores.nodes.items()},
            used={name: sum(g.cores for g in n.grants.values()) for name, n in round_.cores.nodes.items()},
            conflicts=claims.conflicts[pool.name],
            open=round_.open,
            waiting=len(round_.admission.waiting),
        )
    return Plan(tuple(actions), reports, pool_reports)


def _ending(cluster: Cluster, claims: Claims, by_pool: dict[str, list[Tenant]]) -> Counter[str]:
    """Millicores by node of tenants that end outside of their node's pool: they hold them a while yet."""
    owner = {node.name: name for name, nodes in claims.owned.items() for node in nodes}
    in_a_pool = {tenant.key for tenants in by_pool.values() for tenant in tenants}
    held: Counter[str] = Counter()
    for tenant in cluster.tenants:
        at = tenant.placement
        if at is not None and not (tenant.key in in_a_pool and owner.get(at.node) == tenant.pool):
            held[at.node] += at.cores * MILLI
    return held


class _PoolRound:
    """One pool's part of a decision."""

    def __init__(self, cluster: Cluster, pool: Pool, owned: list[Node], tenants: list[Tenant]) -> None:
        self.actions: list[Action] = []
        self.reports: dict[Key, TenantReport] = {}
        self.open = is_open(pool, cluster.now) and not pool.deleting
        verdict = judge(pool.objectives, pool.reading)
        self.guard = advance(pool.guard, pool.objectives, verdict, cluster.now)
        self._cluster = cluster
        self._now = cluster.now
        self._pool = pool
        stage = self.guard.stage
        self.cores = PoolCores([self._node(node, stage, cluster.resizable) for node in owned])
        self.admission = Admission(pool, self.cores, cluster)
        waiting = self._seat(tenants)
        before = {tenant: grant.cores for node in self.cores.nodes.values() for tenant, grant in node.grants.items()}
        self.admission.keep_within_ranges()
        if stage is not Stage.NORMAL:
            self.admission.shrink()
        self.admission.make_fit(self._why_less(stage))
        self.admission.admit(waiting, self._closed(verdict))
        if stage is Stage.NORMAL and self._closed(verdict) is None:
            self.admission.grow()
        self._conclude(before, stage)

    def _node(self, node: Node, stage: Stage, resizable: bool) -> NodeCores:
        capacity = freed_cores(node, self._pool)
        limit = usable(capacity, stage) if self.open else 0
        return NodeCores(node, capacity, limit, self._pool.bandwidth, resizable)

    def _seat(self, tenants: list[Tenant]) -> list[Tenant]:
        """Enter the running ones into the ledger; returns those that wait."""
        waiting = []
        for tenant in tenants:
            if tenant.placement is None:
                waiting.append(tenant)
                if tenant.lingering and self.guard.stage is Stage.EVICT:
                    self.actions.append(self._leave(tenant, Reason.EVICTED_FOR_SLO))
                continue
            node = self.cores.nodes.get(tenant.placement.node)
            if node is None or (tenant.pod_pending and not node.node.schedulable):
                self.admission.removed[tenant] = Reason.NODE_LOST
            elif tenant.pending_since is not None and self._now - tenant.pending_since >= self._cluster.start_limit:
                self.admission.removed[tenant] = Reason.NOT_STARTED
            else:
                node.grants[tenant] = Grant(tenant, tenant.placement.cores, tenant.placement.cores)
        return waiting

    def _why_less(self, stage: Stage) -> Reason:
        if self._pool.deleting:
            return Reason.POOL_DELETED
        if not self.open:
            return Reason.WINDOW_CLOSED
        if stage is Stage.EVICT:
            return Reason.EVICTED_FOR_SLO
        return Reason.SUSPENDED_FOR_SLO if stage is not Stage.NORMAL else Reason.CORES_RECLAIMED

    def _closed(self, verdict: Verdict) -> Reason | None:
        """Why nobody is let in."""
        if self._pool.deleting:
            return Reason.POOL_DELETED
        if not self.open:
            return Reason.WINDOW_CLOSED
        if self._pool.invalid:
            return Reason.POOL_INVALID
        calm = verdict is Verdict.CALM and (self.guard.stage is Stage.NORMAL or self.guard.restoring)
        return None if calm else Reason.GUARD_HOLDS

    def _leave(self, tenant: Tenant, reason: Reason) -> Action:
        kind = Evict if reason is Reason.EVICTED_FOR_SLO else Suspend
        return kind(tenant.key, reason, explain(reason, tenant, self._pool, self.guard))

    def _conclude(self, before: dict[Tenant, int], stage: Stage) -> None:
        for tenant, reason in self.admission.removed.items():
            act = self._leave(tenant, reason)
            self.actions.append(act)
            queued = self._now if reason in _LOSES_PLACE else tenant.waiting_since
            self.reports[tenant.key] = TenantReport(Phase.WAITING, reason, act.message, queued=queued)
        for node in self.cores.nodes.values():
            for grant in node.grants.values():
                self._grant(grant, node.node.name, before.get(grant.tenant), stage)
        for position, (tenant, reason) in enumerate(self.admission.waiting.items(), start=1):
            again = self._cluster.tried_again(tenant)
            text = explain(reason, tenant, self._pool, self.guard, largest=self.cores.largest, until=again)
            self.reports[tenant.key] = TenantReport(
                Phase.WAITING, reason, text, position=position, queued=tenant.waiting_since
            )

    def _grant(self, grant: Grant, node: str, before: int | None, stage: Stage) -> None:
        tenant, cores = grant.tenant, grant.cores
        reason = Reason.RUNNING
        if before is None:
            reason = Reason.RELEASED
        elif cores > before:
            reason = Reason.GROWN
        elif cores < before:
            reason = Reason.SHRUNK_FOR_ROOM if stage is Stage.NORMAL else Reason.SHRUNK_FOR_SLO
            if cores == tenant.max_cores:
                reason = Reason.RANGE_CHANGED
        elif tenant.held_by_kueue:
            reason = Reason.KUEUE_HOLDS
        text = explain(reason, tenant, self._pool, self.guard, cores=cores, node=node)
        if before is None:
            self.actions.append(Release(tenant.key, reason, text, node, cores))
        elif cores != before:
            self.actions.append(Resize(tenant.key, reason, text, cores))
        phase = Phase.WAITING if reason is Reason.KUEUE_HOLDS else Phase.RUNNING
        self.reports[tenant.key] = TenantReport(phase, reason, text, node, cores, queued=tenant.waiting_since)
