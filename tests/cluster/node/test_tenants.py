"""Tenants as pods of a real node: on the cores that serving leaves, whatever becomes of the operator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from services.colocation.observe.objects import resize_refused
from tests.cluster.control_plane import Client, Json
from tests.cluster.node.images import VERSION
from tests.cluster.node.machine import NAME as NODE
from tests.cluster.node.machine import Machine
from tests.cluster.node.release import NAMESPACE, Release
from tests.cluster.scene import JOBS, PODS, POOLS, TENANTS, eventually, pool_manifest, tenant_manifest

WAITS = "import time; time.sleep(3600)"


class Tenants:
    """Puts tenants into the namespace ``batch``."""

    def __init__(self, client: Client, release: Release) -> None:
        self.client = client
        self.release = release

    def add(self, name: str, does: str = WAITS, **spec: Any) -> None:
        thing = tenant_manifest(name, 1, **spec)
        container = thing["spec"]["template"]["spec"]["template"]["spec"]["containers"][0]
        # The operator's image: it is there, and has a Python.
        container |= {"image": f"blink/operator:{VERSION}", "command": ["python", "-c", does]}
        thing["spec"]["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 2
        self.client.create(TENANTS, thing)

    def phase(self, name: str) -> str:
        return str(self.client.get(f"{TENANTS}/{name}").get("status", {}).get("phase"))

    def reaches(self, name: str, phase: str) -> None:
        eventually(lambda: self.phase(name) == phase, lambda: f"{name} is not {phase}\n{self.why()}")

    def running(self) -> list[Json]:
        """Pods that the kubelet has really started."""
        pods = self.client.items(f"{PODS}?labelSelector=blink.dev/tenant")
        return [p for p in pods if p["status"].get("phase") == "Running" and "deletionTimestamp" not in p["metadata"]]

    def why(self) -> str:
        return self.release.kubectl("get", "tenants,pods,jobs", "-n", "batch", "-o", "wide") + self.release.diagnosis()

    def clear(self) -> None:
        for path in (TENANTS, POOLS):
            for thing in self.client.items(path):
                self.client.delete(f"{path}/{thing['metadata']['name']}")
        eventually(lambda: not self.client.items(TENANTS) and not self.client.items(POOLS), self.why)
        eventually(lambda: not self.client.items(PODS), self.why)


@pytest.fixture
def tenants(release: Release, client: Client) -> Iterator[Tenants]:
    """With a pool of this node, which has cores to give."""
    client.call("POST", "/api/v1/namespaces", {"metadata": {"name": "batch"}})
    pool = pool_manifest("p")
    pool["spec"]["nodeSelector"] = {"kubernetes.io/hostname": NODE}
    client.create(POOLS, pool)
    made = Tenants(client, release)
    yield made
    made.clear()


def freed(client: Client) -> int:
    return int(client.get(f"{POOLS}/p").get("status", {}).get("freedCores", 0))


def test_as_many_run_as_cores_are_free_and_the_next_when_one_ends(tenants: Tenants, client: Client) -> None:
    cores = eventually(lambda: freed(client), tenants.why)
    for index in range(cores):
        tenants.add(f"first-{index}", "import time; time.sleep(15)")
        tenants.reaches(f"first-{index}", "Running")
    tenants.add("next")
    tenants.reaches("next", "Waiting")
    eventually(lambda: len(tenants.running()) == cores, tenants.why)
    for pod in tenants.running():
        assert pod["spec"]["nodeName"] == NODE
        assert pod["status"]["qosClass"] == "Guaranteed"
    for index in range(cores):
        tenants.reaches(f"first-{index}", "Succeeded")
    tenants.reaches("next", "Running")
    eventually(lambda: len(tenants.running()) == 1, tenants.why)


def test_the_kubelet_holds_a_tenant_to_its_cores(tenants: Tenants, machine: Machine) -> None:
    tenants.add("a")
    (pod,) = eventually(tenants.running, tenants.why)
    quota = machine.cgroup_value(pod["metadata"]["uid"], "cpu.cfs_quota_us", "cpu.max")
    assert quota.split()[0] == "100000"  # µs of each 100 ms


def test_a_class_of_memory_bandwidth_reaches_the_container_runtime_which_refuses_what_it_does_not_have(
    tenants: Tenants, client: Client
) -> None:
    client.patch(f"{POOLS}/p", {"spec": {"ceilings": {"rdtClass": "tenants"}}})
    tenants.add("a")

    def told() -> str:
        pods = client.items(f"{PODS}?labelSelector=blink.dev/tenant=a")
        states = [each["state"] for pod in pods for each in pod["status"].get("containerStatuses", ())]
        return " ".join(state.get("waiting", {}).get("message", "") for state in states)

    eventually(lambda: "RDT" in told(), lambda: f"{told()} {tenants.why()}")  # containerd has no RDT set up here
    assert '"tenants"' in told()


@pytest.fixture
def static_cpus(machine: Machine) -> Iterator[None]:
    """The node's CPU manager gives whole CPUs away."""
    machine.restart_kubelet(cpuManagerPolicy="static", kubeReserved={"cpu": "100m"})
    yield
    machine.restart_kubelet()


@pytest.mark.usefixtures("static_cpus")
def test_a_static_cpu_manager_gives_a_tenant_a_cpu_of_its_own_and_refuses_another_size(
    tenants: Tenants, machine: Machine
) -> None:
    tenants.add("a")
    (pod,) = eventually(tenants.running, tenants.why)
    own = machine.cpus(pod["status"]["containerStatuses"][0]["containerID"])
    assert len(own) == 1
    (serving,) = tenants.release.pods("gateway")
    (engine,) = serving["status"]["initContainerStatuses"]
    eventually(lambda: not own & machine.cpus(engine["containerID"]), tenants.why)
    # As the operator would see it: the kubelet says so in a condition, and the pod keeps what it has.
    size = {"limits": {"cpu": "500m"}, "requests": {"cpu": "500m"}}
    change = {"spec": {"containers": [{"name": pod["spec"]["containers"][0]["name"], "resources": size}]}}
    name = pod["metadata"]["name"]
    tenants.release.kubectl(
        "patch", "pod", name, "-n", "batch", "--subresource=resize", f"--patch={json.dumps(change)}"
    )

    def refused() -> bool:
        (now,) = tenants.running()
        assert now["status"]["containerStatuses"][0]["resources"]["requests"]["cpu"] == "1"
        return resize_refused(now)

    eventually(refused, tenants.why)


def test_killed_in_the_midst_of_its_work_the_operator_goes_on_and_tenants_never_notice(
    tenants: Tenants, client: Client, machine: Machine
) -> None:
    cores = eventually(lambda: freed(client), tenants.why)
    tenants.add("before")
    (survivor,) = eventually(tenants.running, tenants.why)
    (operator,) = tenants.release.pods("operator")
    container = operator["status"]["containerStatuses"][0]
    before = container["restartCount"]
    for index in range(8):
        tenants.add(f"t{index}")
    machine.ctr("tasks", "kill", "--signal", "SIGKILL", container["containerID"].partition("//")[2])

    def came_back() -> bool:
        (now,) = tenants.release.pods("operator")
        status = now["status"]["containerStatuses"][0]
        return bool(status["ready"]) and status["restartCount"] > before

    eventually(came_back, tenants.why)
    eventually(lambda: len(client.items(JOBS)) == 9, tenants.why)
    phases = {f"t{index}" for index in range(8)}
    eventually(lambda: sum(tenants.phase(name) == "Waiting" for name in phases) == 8 - (cores - 1), tenants.why)
    assert survivor["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in tenants.running()}
    assert len(tenants.running()) <= cores


def test_a_new_operator_pod_takes_the_lease_over(tenants: Tenants) -> None:
    (old,) = tenants.release.pods("operator")
    tenants.release.kubectl("delete", "pod", old["metadata"]["name"], "-n", NAMESPACE, "--grace-period=0", "--force")
    tenants.add("a")
    eventually(tenants.running, tenants.why)
    names = {pod["metadata"]["name"] for pod in tenants.release.pods("operator")}
    assert names
    assert old["metadata"]["name"] not in names


def test_a_drained_tenant_waits_until_its_node_is_back(tenants: Tenants) -> None:
    tenants.add("a")
    (pod,) = eventually(tenants.running, tenants.why)
    tenants.release.kubectl("cordon", NODE)
    try:
        assert [each["metadata"]["uid"] for each in tenants.running()] == [pod["metadata"]["uid"]]
        selector = "--pod-selector=blink.dev/tenant"
        tenants.release.kubectl("drain", NODE, selector, "--force", "--timeout=60s")
        tenants.reaches("a", "Waiting")
    finally:
        tenants.release.kubectl("uncordon", NODE)
    eventually(tenants.running, tenants.why)
    assert tenants.running()[0]["metadata"]["uid"] != pod["metadata"]["uid"]
