"""The Job of a Tenant."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from services.colocation.names import (
    CORES_ANNOTATION,
    GROUP,
    NODE_ANNOTATION,
    QUEUE_LABEL,
    RDT_ANNOTATION,
    RDT_PREFIX,
    TENANT_LABEL,
    VERSION,
)
from services.colocation.observe.objects import Object


def job_manifest(
    tenant: Object, cores: int, node: str, priority_class: str, *, queue: str = "", rdt_class: str = ""
) -> dict[str, Any]:
    """A Job that is suspended and, where ``node`` is named, bound to it; ``queue`` hands it to Kueue.

    Its container asks for exactly ``cores``, and for as much memory as it may use, so that the pod is Guaranteed and
    a static CPU manager gives it whole CPUs of its own. Containers that run before it get the tenant's minimum, so that
    the pod never holds more than its container. ``rdt_class`` is the container runtime's class of memory bandwidth,
    which no tenant chooses, also where there is none.
    """
    metadata, template = tenant["metadata"], tenant["spec"]["template"]
    spec: dict[str, Any] = deepcopy(dict(template["spec"]))
    spec["suspend"] = True
    spec["parallelism"] = 1
    pod = spec["template"]
    label = {TENANT_LABEL: metadata["name"]}
    pod["metadata"] = {**(pod.get("metadata") or {})}
    pod["metadata"]["labels"] = {**(pod["metadata"].get("labels") or {}), **label}
    pod_spec = pod["spec"]
    pod_spec.setdefault("restartPolicy", "Never")
    if priority_class:
        pod_spec["priorityClassName"] = priority_class
    if pod_spec["restartPolicy"] == "Never":
        # A drained node or an eviction is no failure of the tenant's.
        disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        spec.setdefault("podFailurePolicy", {"rules": [disrupted]})
    _size(pod_spec["containers"][0], cores)
    for earlier in pod_spec.get("initContainers") or ():
        _size(earlier, min(cores, tenant["spec"]["cores"]["min"]))
    own_annotations = pod["metadata"].get("annotations") or {}
    others = {name: value for name, value in own_annotations.items() if not name.startswith(RDT_PREFIX)}
    pod["metadata"]["annotations"] = {**others, **({RDT_ANNOTATION: rdt_class} if rdt_class else {})}
    if node:
        pod_spec["affinity"] = bound(pod_spec.get("affinity"), node)
    own = template.get("metadata") or {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": {**_without_queue(own.get("labels")), **label, **({QUEUE_LABEL: queue} if queue else {})},
            "annotations": {**(own.get("annotations") or {}), **placement_annotations(cores, node)},
            "ownerReferences": [
                {
                    "apiVersion": f"{GROUP}/{VERSION}",
                    "kind": "Tenant",
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": spec,
    }


def placement_annotations(cores: int, node: str) -> dict[str, str]:
    """What makes a Job that is not suspended a placed one."""
    return {NODE_ANNOTATION: node, CORES_ANNOTATION: str(cores)}


def bound(affinity: Object | None, node: str) -> dict[str, Any]:
    """``affinity`` with the node as a further requirement; its terms are alternatives, so each of them gets it."""
    made: dict[str, Any] = deepcopy(dict(affinity or {}))
    required = made.setdefault("nodeAffinity", {}).setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [{**term, "matchFields": [*term.get("matchFields", ()), here]} for term in terms]
    return made


def queue_of(tenant: Object) -> str:
    """Kueue's queue that the Job's labels name; empty for none."""
    labels = (tenant["spec"]["template"].get("metadata") or {}).get("labels") or {}
    return str(labels.get(QUEUE_LABEL, ""))


def job_cores(job: Object) -> int:
    """What a new pod of the Job would ask for."""
    return int(job["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"])


def _without_queue(labels: Mapping[str, str] | None) -> dict[str, str]:
    """Kueue would start a Job that has no node yet."""
    return {name: value for name, value in (labels or {}).items() if name != QUEUE_LABEL}


def _size(container: dict[str, Any], cores: int) -> None:
    resources = container.setdefault("resources", {})
    requests, limits = resources.setdefault("requests", {}), resources.setdefault("limits", {})
    requests["cpu"] = limits["cpu"] = str(cores)
    memory = limits.get("memory") or requests.get("memory")
    if memory:
        requests["memory"] = limits["memory"] = memory
