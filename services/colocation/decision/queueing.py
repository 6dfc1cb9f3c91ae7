"""Who is next: priority that grows with waiting, then the namespace that has least, then who came first.

Priority grows by one for each ``AGING``, without end, so that everybody is first some day; what is first and does not
fit gets a node kept free for it (admission.py). Together these leave nobody to starve.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from services.colocation.decision.model import EvictionOrder, Tenant

AGING = timedelta(minutes=1)
_NEVER = datetime.max.replace(tzinfo=UTC)


def effective_priority(tenant: Tenant, now: datetime) -> int:
    return tenant.priority + max(timedelta(), now - tenant.waiting_since) // AGING


class FairQueue:
    """Iterates over waiting tenants in order; ``took`` tells it of cores that a namespace was given meanwhile."""

    def __init__(self, waiting: Iterable[Tenant], used: dict[str, int], now: datetime) -> None:
        self._used = defaultdict(int, used)
        self._levels: dict[int, dict[str, list[Tenant]]] = defaultdict(lambda: defaultdict(list))
        for tenant in waiting:
            self._levels[effective_priority(tenant, now)][tenant.key.namespace].append(tenant)

    def took(self, namespace: str, cores: int) -> None:
        self._used[namespace] += cores

    def __iter__(self) -> Iterator[Tenant]:
        for level in sorted(self._levels, reverse=True):
            queues = {name: deque(sorted(tenants, key=_turn)) for name, tenants in self._levels[level].items()}
            heap = [(self._used[name], _turn(queue[0]), name) for name, queue in queues.items()]
            heapq.heapify(heap)
            while heap:
                _, _, name = heapq.heappop(heap)
                queue = queues[name]
                yield queue.popleft()
                if queue:
                    heapq.heappush(heap, (self._used[name], _turn(queue[0]), name))


def _turn(tenant: Tenant) -> tuple[datetime, datetime, str, str]:
    return (tenant.deadline or _NEVER, tenant.waiting_since, *tenant.key)


def giving_way(tenants: Iterable[Tenant], order: EvictionOrder, cores: dict[Tenant, int]) -> list[Tenant]:
    """Running tenants, first to give way first."""

    def rank(tenant: Tenant) -> tuple[float, float, str, str]:
        newest = -(tenant.changed or tenant.created).timestamp()
        primary = {
            EvictionOrder.LOWEST_PRIORITY_FIRST: float(tenant.priority),
            EvictionOrder.NEWEST_FIRST: newest,
            EvictionOrder.LARGEST_FIRST: float(-cores[tenant]),
        }[order]
        return (primary, newest, *tenant.key)

    return sorted(tenants, key=rank)
