"""Which node is whose, and how many whole cores of it serving leaves free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.colocation.decision.model import MILLI, Node, Pool


@dataclass(frozen=True, slots=True)
class Claims:
    """Each node belongs to one pool at most: to the oldest of those that select it."""

    owned: dict[str, list[Node]]  # by pool
    conflicts: dict[str, dict[str, str]]  # by pool that lost: node -> the pool that has it


def claim(nodes: Iterable[Node], pools: Iterable[Pool]) -> Claims:
    """Share out the nodes. A pool's age decides, so a newcomer never takes a node on which tenants run."""
    by_age = sorted(pools, key=lambda pool: (pool.created, pool.name))
    owned: dict[str, list[Node]] = {pool.name: [] for pool in by_age}
    conflicts: dict[str, dict[str, str]] = {pool.name: {} for pool in by_age}
    for node in sorted(nodes, key=lambda node: node.name):
        owner = ""
        for pool in by_age:
            if any(node.labels.get(name) != value for name, value in pool.selector.items()):
                continue
            if owner:
                conflicts[pool.name][node.name] = owner
            else:
                owner = pool.name
                owned[owner].append(node)
    return Claims(owned, conflicts)


def freed_cores(node: Node, pool: Pool) -> int:
    """Whole cores that tenants may have of ``node``.

    What is allocatable, less what serving is promised (its baseline, or its pods' requests where those are more), less
    the pool's reserve, less what all other pods request; and never more than the pool's ceiling.
    """
    serving = max(pool.baseline_cores * MILLI, node.serving)
    free = node.allocatable - serving - pool.reserved_cores * MILLI - node.others
    ceiling = node.allocatable * pool.cpu_percent // 100
    return max(0, min(free, ceiling)) // MILLI
