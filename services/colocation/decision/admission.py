"""One pool's tenants: who must give way, who may come, who gets what is left."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from services.colocation.decision.actions import Reason
from services.colocation.decision.ledger import Grant, NodeCores, PoolCores
from services.colocation.decision.model import Cluster, Pool, Preemption, Tenant
from services.colocation.decision.queueing import FairQueue, giving_way

SETTLE = timedelta(seconds=60)  # between two growths of a tenant
PREEMPTORS = 8  # tenants for which others are pushed out in one round


class Admission:
    """Changes the grants of ``cores`` step by step; ``removed`` and ``waiting`` (in the queue's order) say why."""

    def __init__(self, pool: Pool, cores: PoolCores, cluster: Cluster) -> None:
        self.cores = cores
        self.removed: dict[Tenant, Reason] = {}
        self.waiting: dict[Tenant, Reason] = {}
        self._pool = pool
        self._cluster = cluster
        self._now = cluster.now
        self._resizable = cluster.resizable

    def keep_within_ranges(self) -> None:
        """Nobody has more than it asks for now, where pods can be resized."""
        for node in self.cores.nodes.values():
            for grant in node.grants.values():
                if self._resizable and grant.tenant.resizable:
                    grant.cores = min(grant.cores, grant.tenant.max_cores)

    def shrink(self) -> None:
        """Everybody to the minimum, where pods can be resized."""
        if self._resizable:
            for node in self.cores.nodes.values():
                for grant in node.grants.values():
                    grant.cores = grant.least

    def make_fit(self, reason: Reason) -> None:
        """Have no node's tenants hold more than its limit: shrink first, then suspend."""
        for node in self.cores.nodes.values():
            node.make_room(0)
            if node.free >= 0:
                continue
            leavers = self._giving_way(node, list(node.grants))
            if reason is Reason.CORES_RECLAIMED:  # who has not got in yet goes before who runs
                leavers.sort(key=lambda tenant: not tenant.pod_pending)
            for tenant in leavers:
                if node.free >= 0:
                    break
                node.remove(tenant)
                self.removed[tenant] = reason

    def admit(self, waiting: list[Tenant], closed: Reason | None) -> None:
        """Let in whoever fits, in the queue's order; nobody while ``closed`` says why not."""
        self.cores.index()
        used: Counter[str] = Counter()
        for each in self.cores.nodes.values():
            for grant in each.grants.values():
                used[grant.tenant.key.namespace] += grant.cores
        queue = FairQueue(waiting, used, self._now)
        kept: NodeCores | None = None  # for the first that does not fit
        preemptors = 0
        node: NodeCores | None
        for tenant in queue:
            if closed is not None:
                self.waiting[tenant] = closed
            elif (never := self._never(tenant)) is not None:
                self.waiting[tenant] = never
            elif self._cluster.tried_again(tenant) is not None:
                self.waiting[tenant] = Reason.TRIED_LATER
            elif (node := self.cores.tightest(tenant, kept)) is not None:
                self._place(tenant, node)
                queue.took(tenant.key.namespace, tenant.min_cores)
            elif kept is None:
                self.waiting[tenant] = Reason.NO_ROOM
                kept = self._preempt(tenant) or self.cores.soonest(tenant)
            else:
                behind = self.cores.tightest(tenant) is kept
                self.waiting[tenant] = Reason.BEHIND_RESERVATION if behind else Reason.NO_ROOM
                if preemptors < PREEMPTORS and self._preempt(tenant, kept) is not None:
                    preemptors += 1

    def grow(self) -> None:
        """Hand out what is left, one core at a time to whoever of the node has least.

        Where a running pod's size is fixed, only newcomers get more than their minimum, and only while nobody waits.
        """
        if self.waiting and not self._resizable:
            return
        for node in self.cores.nodes.values():
            able = [grant for grant in node.grants.values() if self._may_grow(grant)]
            free = min(node.free, node.capacity - node.leaving - sum(g.cores for g in node.grants.values()))
            bandwidth = node.bandwidth_left()
            while able and free > 0:
                grant = min(able, key=lambda each: (each.cores, each.tenant.key))
                per_core = grant.tenant.bandwidth_per_core
                if grant.cores >= grant.tenant.max_cores or (bandwidth is not None and per_core > bandwidth):
                    able.remove(grant)
                    continue
                grant.cores += 1
                free -= 1
                bandwidth = None if bandwidth is None else bandwidth - per_core

    def _never(self, tenant: Tenant) -> Reason | None:
        """Why no end of another's will let it in: it must hold up nobody, and push out nobody."""
        if tenant.invalid:
            return Reason.INVALID
        if tenant.min_cores > self.cores.largest:
            return Reason.TOO_LARGE
        if tenant.min_cores > self.cores.largest_for(tenant):
            return Reason.NO_SUITABLE_NODE
        if self._pool.bandwidth is not None and tenant.least_bandwidth > self._pool.bandwidth:
            return Reason.TOO_MUCH_BANDWIDTH
        return None

    def _place(self, tenant: Tenant, node: NodeCores) -> None:
        node.make_room(tenant.min_cores, tenant.least_bandwidth)
        node.grants[tenant] = Grant(tenant, tenant.min_cores, 0)
        self.cores.moved(node)

    def _may_grow(self, grant: Grant) -> bool:
        if not grant.was:
            return True
        settled = grant.tenant.changed is None or self._now - grant.tenant.changed >= SETTLE
        able = self._resizable and grant.tenant.resizable and not grant.tenant.pod_pending
        return able and settled and grant.cores == grant.was

    def _preempt(self, tenant: Tenant, but: NodeCores | None = None) -> NodeCores | None:
        """Push out as few tenants of lower priority as make room on one node; None when that is not to be.

        Where those who are leaving already will make the room, nobody else is pushed out.
        """
        if tenant.preemption is not Preemption.LOWER_PRIORITY:
            return None
        best: tuple[int, int, str] | None = None
        victims: list[Tenant] = []
        for node in self.cores.suitable(tenant).values():
            if node is but or node.capacity < tenant.min_cores:
                continue
            if node.room_soon >= tenant.min_cores and node.carries(tenant, tenant.min_cores):
                return node
            chosen = self._victims(tenant, node)
            if chosen:
                cost = (max(other.priority for other in chosen), len(chosen), node.node.name)
                if best is None or cost < best:
                    best, victims = cost, chosen
        if best is None:
            return None
        node = self.cores.nodes[best[2]]
        for victim in victims:
            node.remove(victim)
            self.removed[victim] = Reason.PREEMPTED
        self.cores.moved(node)
        return node

    def _victims(self, tenant: Tenant, node: NodeCores) -> list[Tenant]:
        lower = [other for other, grant in node.grants.items() if grant.was and other.priority < tenant.priority]
        room, chosen = node.room_soon, []
        for other in self._giving_way(node, lower):
            if room >= tenant.min_cores:
                break
            grant = node.grants[other]
            room += grant.least if self._resizable else grant.cores
            chosen.append(other)
        return chosen if room >= tenant.min_cores else []

    def _giving_way(self, node: NodeCores, tenants: list[Tenant]) -> list[Tenant]:
        sizes = {tenant: node.grants[tenant].cores for tenant in tenants}
        return giving_way(tenants, self._pool.eviction_order, sizes)
