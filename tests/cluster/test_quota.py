"""The chart's namespace for tenants: what its ResourceQuota and its Pod Security refuse is refused, and explained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.control_plane import Client, ControlPlane, Json
from tests.cluster.operators import Operator
from tests.cluster.scene import NODES, PODS, TENANTS, Scene, dry, eventually, tenant_manifest
from tests.deploy.chart.rendering import rendered

NAMESPACE = "/api/v1/namespaces/batch"
QUOTAS = f"{NAMESPACE}/resourcequotas"
SMALL = {"cpu": "4", "memory": "1Gi", "pods": 3, "tenants": 4}
TENANTS_OF_CHART: Json = {"namespace": "batch", "createNamespace": True, "quota": SMALL}


def of_chart(kind: str) -> Json:
    """An object that the chart makes of ``tenants.*``."""
    (found,) = (
        each
        for each in rendered("cpu-demo", {"tenants": TENANTS_OF_CHART})
        if each["kind"] == kind and "batch" in (each["metadata"]["name"], each["metadata"].get("namespace"))
    )
    return found


@pytest.fixture
def no_devices(client: Client, scene: Scene) -> Iterator[Json]:
    """The quota of the chart's profile for GPUs and RDMA, from when it counts."""
    (made,) = (each for each in rendered("dpu-rdma", {"tenants": TENANTS_OF_CHART}) if each["kind"] == "ResourceQuota")
    path = f"{QUOTAS}/{client.create(QUOTAS, made)['metadata']['name']}"
    try:
        counted = {name for name in made["spec"]["hard"] if not name.startswith("count/")}
        eventually(lambda: counted <= set(client.get(path).get("status", {}).get("used", ())))
        yield made
    finally:
        client.delete(path)


@pytest.fixture
def quota(client: Client, scene: Scene) -> Iterator[Json]:
    """As the chart installs it, from when it counts; taken away after the tenants."""
    made = client.create(QUOTAS, of_chart("ResourceQuota"))
    path = f"{QUOTAS}/{made['metadata']['name']}"
    try:
        counted = set(made["spec"]["hard"])
        eventually(lambda: set(client.get(path)["status"].get("used", ())) == counted, lambda: f"{client.get(path)}")
        yield made
    finally:
        scene.clear()
        client.delete(path)


@pytest.fixture
def pod_security(client: Client, scene: Scene) -> Iterator[None]:
    """The labels that the chart gives the namespace when it makes it."""
    labels = {k: v for k, v in of_chart("Namespace")["metadata"]["labels"].items() if k.startswith("pod-security")}
    assert labels
    client.patch(NAMESPACE, {"metadata": {"labels": labels}})
    yield
    scene.clear()
    client.patch(NAMESPACE, {"metadata": {"labels": dict.fromkeys(labels)}})


@pytest.fixture
def impatient(plane: ControlPlane, scene: Scene, tmp_path: Path) -> Iterator[Operator]:
    with Operator(plane.kubeconfig_of("serving", "blink-operator"), tmp_path, start_limit="5") as running:
        yield running
        scene.clear()


def tenant(name: str, least: int, memory: str = "64Mi", **pod: Any) -> Json:
    thing = tenant_manifest(name, least)
    within = thing["spec"]["template"]["spec"]["template"]["spec"]
    within["containers"][0]["resources"] = {"limits": {"memory": memory}} if memory else {}
    within |= pod
    return thing


def test_what_the_quota_has_room_for_runs_and_what_is_over_it_says_so_and_comes_when_there_is_room(
    quota: Json, impatient: Operator, scene: Scene
) -> None:
    scene.node("n0", 16)
    scene.pool()
    scene.client.create(TENANTS, tenant("first", 3))
    first = scene.running_pod("first")
    used = eventually(lambda: scene.client.get(f"{QUOTAS}/{quota['metadata']['name']}")["status"]["used"])
    assert used["requests.cpu"] == "3"
    scene.client.create(TENANTS, tenant("second", 2))
    eventually(lambda: "NotStarted" in scene.reasons("second"), impatient.log)
    message = scene.phase("second", "Waiting")["message"]
    assert f"exceeded quota: {quota['metadata']['name']}" in message
    assert "requests.cpu=2" in message
    assert not scene.pods("second")
    scene.client.create(TENANTS, tenant("third", 1))  # nobody is held up by what the quota refuses
    scene.running_pod("third")
    scene.kubelet.finish(first)
    scene.running_pod("second")


@pytest.mark.parametrize(
    ("memory", "named"), [("2Gi", "limits.memory=2Gi"), ("", "must specify limits.memory")], ids=["too much", "none"]
)
def test_memory_over_the_quota_or_not_named_at_all_is_explained(
    quota: Json, impatient: Operator, scene: Scene, memory: str, named: str
) -> None:
    scene.node("n0", 16)
    scene.pool()
    scene.client.create(TENANTS, tenant("a", 1, memory))
    eventually(lambda: named in scene.status("a").get("message", ""), lambda: f"{scene.status('a')} {impatient.log()}")


def test_no_more_tenants_are_taken_than_the_quota_counts(quota: Json, scene: Scene) -> None:
    for index in range(SMALL["tenants"]):  # type: ignore[call-overload]
        scene.client.create(TENANTS, tenant(f"t{index}", 1))
    answer = scene.client.call("POST", TENANTS, tenant("one-more", 1))
    assert answer.status_code == 403
    assert f"exceeded quota: {quota['metadata']['name']}" in answer.json()["message"]


def test_no_pod_of_the_namespace_gets_a_device_that_serving_asks_for(no_devices: Json, scene: Scene) -> None:
    devices = {name.removeprefix("requests.") for name, most in no_devices["spec"]["hard"].items() if most == "0"}
    assert {"nvidia.com/gpu", "nvidia.com/bf_sf"} < devices

    def ask(**amounts: str) -> Any:
        of_one = {"requests": {"cpu": "1"}, "limits": {"memory": "64Mi", **amounts}}
        one = {"name": "a", "image": "example.invalid/x", "resources": of_one}
        return scene.client.call("POST", dry(PODS), {"metadata": {"name": "x"}, "spec": {"containers": [one]}})

    assert ask().ok
    for device in devices:
        answer = ask(**{device: "1"})
        assert answer.status_code == 403
        assert f"requests.{device}=1" in answer.json()["message"]


@pytest.mark.usefixtures("pod_security")
def test_in_the_charts_namespace_the_example_of_the_docs_runs_and_a_pod_that_may_too_much_does_not(
    impatient: Operator, scene: Scene
) -> None:
    scene.node("n0", 16)
    scene.pool()
    example = documented()
    example["spec"] |= {"pool": "p", "deadline": "2099-01-01T00:00:00Z"}
    scene.client.create(dry(TENANTS), example)
    scene.client.create(TENANTS, example)
    scene.running_pod(example["metadata"]["name"])
    scene.client.create(TENANTS, tenant("root", 1, securityContext={"runAsUser": 0}))
    eventually(lambda: "violates PodSecurity" in scene.status("root").get("message", ""), impatient.log)
    assert not scene.client.items(f"{PODS}?labelSelector=blink.dev/tenant=root")
    assert scene.client.items(NODES)


def documented() -> Json:
    """The Tenant that docs/kubernetes.md shows."""
    import yaml  # noqa: PLC0415

    text = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    for block in text.split("```yaml\n")[1:]:
        for thing in yaml.safe_load_all(block.split("```")[0]):
            if isinstance(thing, dict) and thing.get("kind") == "Tenant":
                return thing
    raise AssertionError("docs/kubernetes.md shows no Tenant")
