"""Which nodes a tenant's pod may be bound to, as far as its template's selector and the nodes' taints tell.

What else the scheduler looks at (affinity, volumes, memory) shows when a pod does not start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Taint(NamedTuple):
    """One that keeps pods off a node: its effect is NoSchedule or NoExecute."""

    key: str
    value: str
    effect: str


class Toleration(NamedTuple):
    """Of a pod, as Kubernetes has it: an empty ``key`` or ``effect`` stands for all."""

    key: str
    operator: str
    value: str
    effect: str

    def tolerates(self, taint: Taint) -> bool:
        """Operators that are not known here are the scheduler's to judge."""
        if (self.effect and self.effect != taint.effect) or (self.key and self.key != taint.key):
            return False
        return self.operator not in {"", "Equal"} or self.value == taint.value


class Demands(NamedTuple):
    """What many tenants have in common, so that nodes are looked through once for all of them."""

    selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()

    def met_by(self, labels: Mapping[str, str], taints: Iterable[Taint]) -> bool:
        return all(labels.get(name) == value for name, value in self.selector) and all(
            any(each.tolerates(taint) for each in self.tolerations) for taint in taints
        )
