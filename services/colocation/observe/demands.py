"""What a pod template demands of its node, and what a node keeps off it."""

from __future__ import annotations

from typing import Any

from services.colocation.decision.demands import Demands, Taint, Toleration

REPELLING = frozenset({"NoSchedule", "NoExecute"})


def demands_of(pod_spec: Any) -> Demands:
    """Of a template, which may be anything that is JSON: what the API server would refuse demands nothing."""
    selector, tolerations = pod_spec.get("nodeSelector"), pod_spec.get("tolerations")
    wanted = sorted(selector.items()) if isinstance(selector, dict) else []
    told = [each for each in tolerations if isinstance(each, dict)] if isinstance(tolerations, list) else []
    return Demands(
        tuple((name, value) for name, value in wanted if isinstance(value, str)),
        tuple(Toleration(*(_text(each, name) for name in Toleration._fields)) for each in told),
    )


def taints_of(node_spec: Any) -> tuple[Taint, ...]:
    """Those of a Node that keep pods away."""
    return tuple(
        Taint(each["key"], each.get("value", ""), each["effect"])
        for each in node_spec.get("taints") or ()
        if each["effect"] in REPELLING
    )


def _text(of: dict[str, Any], name: str) -> str:
    value = of.get(name)
    return value if isinstance(value, str) else ""
