"""Objects as an API server gives them, for tests."""

from __future__ import annotations

from typing import Any

from services.colocation.names import CORES_ANNOTATION, NODE_ANNOTATION, TENANT_LABEL

CREATED = "2026-03-02T12:00:00Z"
Json = dict[str, Any]


def metadata(name: str, namespace: str | None = "batch", **values: Any) -> Json:
    own: Json = {"name": name, "uid": f"uid-{name}", "creationTimestamp": CREATED, "generation": 1}
    if namespace:
        own["namespace"] = namespace
    return {**own, "resourceVersion": "1", **values}


def tenant(name: str = "a", pod: Json | None = None, **spec: Any) -> Json:
    container = {"name": "main", "image": "busybox"}
    template = {"spec": {"template": {"spec": {"containers": [container], **(pod or {})}}}}
    return {"metadata": metadata(name), "spec": {"pool": "p", "cores": {"min": 2}, "template": template, **spec}}


def job(name: str = "a", suspend: bool = True, node: str = "", cores: int = 2, **status: Any) -> Json:
    placed = {NODE_ANNOTATION: node, CORES_ANNOTATION: str(cores)} if node else {}
    container = {"name": "main", "resources": {"requests": {"cpu": str(cores)}}}
    return {
        "metadata": metadata(
            name,
            uid=f"job-{name}",
            labels={TENANT_LABEL: name},
            annotations=placed,
            ownerReferences=[{"uid": f"uid-{name}"}],
        ),
        "spec": {"suspend": suspend, "template": {"spec": {"containers": [container]}}},
        "status": status,
    }


def pod(name: str, node: str = "n0", cpu: str = "1", **of_metadata: Any) -> Json:
    return {
        "metadata": metadata(name, **of_metadata),
        "spec": {"nodeName": node, "containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}]},
        "status": {"phase": "Running"},
    }


def tenant_pod(of: str = "a", name: str = "", node: str = "n0", cpu: str = "2", **of_metadata: Any) -> Json:
    owners = [{"uid": f"job-{of}"}]
    return pod(name or f"{of}-xyz", node, cpu, labels={TENANT_LABEL: of}, **{"ownerReferences": owners, **of_metadata})


def node(name: str = "n0", cpu: str = "16", ready: bool = True, **spec: Any) -> Json:
    return {
        "metadata": metadata(name, None, labels={"pool": "p"}),
        "spec": spec,
        "status": {
            "allocatable": {"cpu": cpu},
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def pool(name: str = "p", **spec: Any) -> Json:
    plain = {"nodeSelector": {"pool": "p"}, "serving": {"baselineCores": 2}}
    return {"metadata": metadata(name, None), "spec": {**plain, **spec}}


def newer(thing: Json, **changes: Any) -> Json:
    version = str(int(thing["metadata"]["resourceVersion"]) + 1)
    return {**thing, **changes, "metadata": {**thing["metadata"], "resourceVersion": version}}
