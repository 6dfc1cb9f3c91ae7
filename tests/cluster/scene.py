"""What tests put into a cluster and look for in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from tests.cluster.control_plane import Client, Json
from tests.cluster.hollow import HollowKubelet

API = "/apis/blink.dev/v1alpha1"
POOLS = f"{API}/tenantpools"
TENANTS = f"{API}/namespaces/batch/tenants"
JOBS = "/apis/batch/v1/namespaces/batch/jobs"
PODS = "/api/v1/namespaces/batch/pods"
EVENTS = "/apis/events.k8s.io/v1/namespaces/batch/events"
NODES = "/api/v1/nodes"
WAIT_SECONDS = 50.0
STABLE_SECONDS = 3.0

T = TypeVar("T")


def eventually(look: Callable[[], T | None], why: Callable[[], str] = lambda: "", seconds: float = WAIT_SECONDS) -> T:
    """The first true answer. Fails with ``why`` when none comes in time."""
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < end, why()
        time.sleep(0.1)


def dry(path: str) -> str:
    """Asks what would happen; strict, so that a field that is unknown is an error."""
    return f"{path}?dryRun=All&fieldValidation=Strict"


def pool_manifest(name: str = "p", selects: str = "p", baseline: int = 0, **spec: Any) -> Json:
    plain = {"nodeSelector": {"pool": selects}, "serving": {"baselineCores": baseline}}
    return {
        "apiVersion": "blink.dev/v1alpha1",
        "kind": "TenantPool",
        "metadata": {"name": name},
        "spec": {**plain, **spec},
    }


def tenant_manifest(
    name: str, least: int = 1, most: int | None = None, labels: Json | None = None, **spec: Any
) -> Json:
    memory = {"requests": {"memory": "64Mi"}}
    container = {"name": "main", "image": "example.invalid/x", "resources": memory}
    pod = {"metadata": {"labels": labels or {}}, "spec": {"containers": [container]}}
    cores = {"min": least} if most is None else {"min": least, "max": most}
    return {
        "apiVersion": "blink.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": name, "namespace": "batch"},
        "spec": {"pool": "p", "cores": cores, "template": {"spec": {"template": pod}}, **spec},
    }


class Scene:
    """One test's objects."""

    def __init__(self, client: Client, kubelet: HollowKubelet) -> None:
        self.client = client
        self.kubelet = kubelet

    def node(self, name: str, cores: int = 8, pool: str = "p") -> None:
        self.client.create(
            NODES, {"metadata": {"name": name, "labels": {"pool": pool, "kubernetes.io/hostname": name}}}
        )
        room = {"cpu": str(cores), "memory": "64Gi", "pods": "110"}
        # What a node without a kubelet is given, and what nobody takes away here.
        self.client.patch(f"{NODES}/{name}", {"spec": {"taints": None}})
        ready = [{"type": "Ready", "status": "True", "reason": "Test", "message": ""}]
        self.client.patch(
            f"{NODES}/{name}/status", {"status": {"allocatable": room, "capacity": room, "conditions": ready}}
        )

    def pool(self, name: str = "p", **spec: Any) -> None:
        self.client.create(POOLS, pool_manifest(name, **spec))

    def tenant(
        self, name: str, least: int = 1, most: int | None = None, labels: Json | None = None, **spec: Any
    ) -> None:
        self.client.create(TENANTS, tenant_manifest(name, least, most, labels, **spec))

    def status(self, name: str) -> Json:
        found: Json = self.client.get(f"{TENANTS}/{name}").get("status", {})
        return found

    def pool_status(self, name: str = "p") -> Json:
        found: Json = self.client.get(f"{POOLS}/{name}").get("status", {})
        return found

    def conditions(self, pool: str = "p") -> dict[str, str]:
        """A pool's, by type."""
        return {each["type"]: each["status"] for each in self.pool_status(pool).get("conditions", ())}

    def phase(self, name: str, phase: str) -> Json:
        """Wait for it; returns the status."""
        eventually(lambda: self.status(name).get("phase") == phase, lambda: f"{name}: {self.status(name)}")
        return self.status(name)

    def pods(self, of: str = "") -> list[Json]:
        """Tenants' pods that have not ended."""
        selector = f"blink.dev/tenant={of}" if of else "blink.dev/tenant"
        found = self.client.items(f"{PODS}?labelSelector={selector}")
        return [pod for pod in found if pod["status"].get("phase") not in {"Succeeded", "Failed"}]

    def running_pod(self, of: str) -> Json:
        """Wait for the one pod of a tenant that runs."""

        def look() -> Json | None:
            pods = self.pods(of)
            return pods[0] if len(pods) == 1 and pods[0]["status"].get("phase") == "Running" else None

        return eventually(look, lambda: f"{of}: {self.status(of)}, {self.pods(of)}")

    def cores_by_node(self) -> dict[str, int]:
        """What tenants' pods hold, by the scheduler's own binding."""
        held: dict[str, int] = {}
        for pod in self.pods():
            if node := pod["spec"].get("nodeName"):
                held[node] = held.get(node, 0) + int(pod["spec"]["containers"][0]["resources"]["requests"]["cpu"])
        return held

    def reasons(self, of: str) -> list[str]:
        """Reasons of a tenant's events, oldest first."""
        mine = {"kind": "Tenant", "name": of}
        events = [event for event in self.client.items(EVENTS) if mine.items() <= event["regarding"].items()]
        return [event["reason"] for event in sorted(events, key=lambda event: event["eventTime"] or "")]

    def clear(self) -> None:
        """Everything goes; with no operator there, its finalizers are taken away by hand."""
        for path, things in ((TENANTS, self.client.items(TENANTS)), (POOLS, self.client.items(POOLS))):
            for thing in things:
                one = f"{path}/{thing['metadata']['name']}"
                self.client.call("PATCH", one, {"metadata": {"finalizers": None}})
                self.client.delete(one)
        for job in self.client.items(JOBS):
            self.client.delete(f"{JOBS}/{job['metadata']['name']}", {"propagationPolicy": "Background"})
        for pod in self.client.items(PODS):
            one = f"{PODS}/{pod['metadata']['name']}"
            self.client.call("PATCH", one, {"metadata": {"finalizers": None}})
            self.client.delete(one, {"gracePeriodSeconds": 0})
        for node in self.client.items(NODES):
            self.client.delete(f"{NODES}/{node['metadata']['name']}")
        eventually(lambda: not (self.client.items(TENANTS) or self.client.items(POOLS) or self.client.items(PODS)))


def stays(holds: Callable[[], bool], scene: Scene) -> None:
    """That what holds now goes on to hold over several rounds."""
    end = time.monotonic() + STABLE_SECONDS
    while time.monotonic() < end:
        assert holds(), scene.cores_by_node()
        time.sleep(0.2)
