"""The cores of one pool while a decision is made: who has which, and where there is room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.colocation.decision.demands import Demands
from services.colocation.decision.model import MILLI, Node, Tenant


@dataclass(slots=True)
class Grant:
    """What a tenant on a node has now and is to have."""

    tenant: Tenant
    cores: int
    was: int  # 0: it is released only now

    @property
    def least(self) -> int:
        """What it can be brought down to where the cluster can resize pods."""
        return min(self.cores, self.tenant.min_cores) if self.tenant.resizable else self.cores


@dataclass(slots=True)
class NodeCores:
    """One node: ``capacity`` is what serving leaves, ``limit`` what of it tenants may hold now."""

    node: Node
    capacity: int
    limit: int
    bandwidth: int | None
    resizable: bool
    grants: dict[Tenant, Grant] = field(default_factory=dict)
    leaving: int = 0  # held by pods that have been, or are now, told to end

    def __post_init__(self) -> None:
        self.leaving = -(-self.node.leaving // MILLI)

    @property
    def free(self) -> int:
        """Cores that nobody is to have; below 0, tenants hold more than they may."""
        return self.limit - sum(grant.cores for grant in self.grants.values())

    @property
    def room(self) -> int:
        """Cores for a newcomer, now, once those above their minimum have been brought down to it."""
        return self.room_soon - max(0, self.leaving - (self.capacity - self.limit))

    @property
    def room_soon(self) -> int:
        """The same when those that are leaving have left."""
        return self.limit - sum(self._held(grant) for grant in self.grants.values())

    def carries(self, tenant: Tenant, cores: int) -> bool:
        """Whether the memory bandwidth that its tenants declare leaves enough for ``cores`` of ``tenant``."""
        if self.bandwidth is None:
            return True
        declared = sum(grant.tenant.bandwidth_per_core * self._held(grant) for grant in self.grants.values())
        return declared + tenant.bandwidth_per_core * cores <= self.bandwidth

    def bandwidth_left(self) -> int | None:
        """MB/s that the tenants' grants leave; None without a ceiling."""
        if self.bandwidth is None:
            return None
        return self.bandwidth - sum(grant.tenant.bandwidth_per_core * grant.cores for grant in self.grants.values())

    def make_room(self, cores: int, bandwidth: int = 0) -> None:
        """Bring the largest down, until ``cores`` and MB/s of ``bandwidth`` are free or all are at their minimum."""
        while self.resizable and (self.free < cores or (self.bandwidth_left() or bandwidth) < bandwidth):
            grant = max(self.grants.values(), key=lambda each: (each.cores - each.least, each.tenant.key), default=None)
            if grant is None or grant.cores <= grant.least:
                return
            grant.cores -= 1

    def remove(self, tenant: Tenant) -> None:
        """The tenant is told to end; its cores are not free before it has."""
        self.leaving += self.grants.pop(tenant).was

    def _held(self, grant: Grant) -> int:
        return grant.least if self.resizable else grant.cores


class PoolCores:
    """Nodes by the room that they have, so that the tightest one that fits is found without looking at all."""

    def __init__(self, nodes: list[NodeCores]) -> None:
        self.nodes = {each.node.name: each for each in nodes}
        self.largest = max((each.capacity for each in nodes if each.node.schedulable), default=0)
        self._suitable: dict[Demands, dict[str, NodeCores]] = {}
        self._largest_for: dict[Demands, int] = {}
        self._by_room: dict[int, dict[str, NodeCores]] = {}
        self._room: dict[str, int] = {}

    def index(self) -> None:
        """Sort all nodes anew."""
        self._by_room, self._room = {}, {}
        for each in self.nodes.values():
            self.moved(each)

    def moved(self, node: NodeCores) -> None:
        """Somebody came to the node, left it or changed size."""
        name = node.node.name
        before, now = self._room.get(name), node.room
        if before == now:
            return
        if before is not None:
            del self._by_room[before][name]
        self._room[name] = now
        self._by_room.setdefault(now, {})[name] = node

    def suitable(self, tenant: Tenant) -> dict[str, NodeCores]:
        """Nodes that take pods, and this tenant's among them."""
        found = self._suitable.get(tenant.demands)
        if found is None:
            found = self._suitable[tenant.demands] = {
                name: each
                for name, each in self.nodes.items()
                if each.node.schedulable and tenant.demands.met_by(each.node.labels, each.node.taints)
            }
        return found

    def largest_for(self, tenant: Tenant) -> int:
        """What the largest node that suits it frees."""
        if tenant.demands not in self._largest_for:
            freed = (each.capacity for each in self.suitable(tenant).values())
            self._largest_for[tenant.demands] = max(freed, default=0)
        return self._largest_for[tenant.demands]

    def tightest(self, tenant: Tenant, but: NodeCores | None = None) -> NodeCores | None:
        """The suitable node with the least room that takes the tenant at its minimum."""
        suitable = self.suitable(tenant)
        for node in self._by_least_room(tenant.min_cores):
            if node is not but and node.node.name in suitable and node.carries(tenant, tenant.min_cores):
                return node
        return None

    def soonest(self, tenant: Tenant) -> NodeCores | None:
        """The node that is nearest to taking the tenant, of those that ever could."""
        able = [each for each in self.suitable(tenant).values() if each.capacity >= tenant.min_cores]
        return max(able, key=lambda each: (each.room_soon, each.node.name), default=None)

    def _by_least_room(self, least: int) -> Iterator[NodeCores]:
        for room in sorted(room for room in self._by_room if room >= least):
            yield from self._by_room[room].values()
