"""The operator and tenants whose Job or pod is refused, or takes no node: they say why, and hold nobody up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane, Json
from tests.cluster.operators import Operator
from tests.cluster.scene import JOBS, NODES, PODS, TENANTS, Scene, eventually, stays, tenant_manifest

QUOTAS = "/api/v1/namespaces/batch/resourcequotas"


@pytest.fixture
def impatient(plane: ControlPlane, scene: Scene, tmp_path: Path) -> Iterator[Operator]:
    """An operator that gives pods less time to start."""
    account = plane.kubeconfig_of("serving", "blink-operator")
    with Operator(account, tmp_path, start_limit="5") as running:
        yield running
        scene.clear()


@contextlib.contextmanager
def quota(scene: Scene, hard: Json) -> Iterator[None]:
    """One named "small", from when it counts."""
    made = scene.client.create(QUOTAS, {"metadata": {"name": "small"}, "spec": {"hard": hard}})
    path = f"{QUOTAS}/{made['metadata']['name']}"
    try:
        eventually(lambda: scene.client.get(path).get("status", {}).get("used"))
        yield
    finally:
        scene.client.delete(path)


def test_a_tenant_whose_pod_no_node_takes_makes_room_for_the_next(impatient: Operator, scene: Scene) -> None:
    scene.node("n0", 4)
    scene.pool()
    stuck = tenant_manifest("stuck", 4, priority=900)
    nowhere = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "disk", "operator": "Exists"}]}]}
    stuck["spec"]["template"]["spec"]["template"]["spec"]["affinity"] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": nowhere}
    }
    scene.client.create(TENANTS, stuck)
    scene.phase("stuck", "Running")
    scene.tenant("next", 4)
    scene.phase("next", "Waiting")
    scene.running_pod("next")
    assert "NotStarted" in scene.reasons("stuck"), impatient.log()
    assert "others go first until" in scene.phase("stuck", "Waiting")["message"]


def test_a_tenant_is_given_no_node_whose_taint_it_does_not_tolerate_and_says_so_where_there_is_no_other(
    impatient: Operator, scene: Scene
) -> None:
    scene.node("n0", 4)  # the tighter one
    scene.client.patch(f"{NODES}/n0", {"spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}]}})
    scene.node("n1", 8)
    scene.pool()
    scene.tenant("a", 4)
    assert scene.running_pod("a")["spec"]["nodeName"] == "n1"
    picky = tenant_manifest("picky", 4, priority=900)
    picky["spec"]["template"]["spec"]["template"]["spec"]["nodeSelector"] = {"disk": "none-such"}
    scene.client.create(TENANTS, picky)
    assert "labels of its nodeSelector" in scene.phase("picky", "Waiting")["message"]
    scene.tenant("b", 4)  # nothing is kept for the other
    assert scene.running_pod("b")["spec"]["nodeName"] == "n1"
    assert "NotStarted" not in scene.reasons("picky")


def test_a_tenant_whose_pod_a_quota_forbids_makes_room_for_the_next(impatient: Operator, scene: Scene) -> None:
    with quota(scene, {"limits.memory": "1Gi"}):
        scene.node("n0", 4)
        scene.pool()
        stuck = tenant_manifest("stuck", 4, priority=900)
        stuck["spec"]["template"]["spec"]["template"]["spec"]["containers"][0]["resources"] = {
            "limits": {"memory": "2Gi"}
        }
        scene.client.create(TENANTS, stuck)
        scene.phase("stuck", "Running")
        scene.tenant("next", 4)
        scene.running_pod("next")
        assert "NotStarted" in scene.reasons("stuck"), impatient.log()


def test_a_tenant_whose_pod_failed_and_whose_next_a_quota_forbids_makes_room_and_says_which_quota(
    impatient: Operator, scene: Scene
) -> None:
    scene.node("n0", 4)
    scene.pool()
    scene.tenant("stuck", 4, priority=900)
    first = scene.running_pod("stuck")
    # The pod that failed does not count any more, but this one does.
    other = {"metadata": {"name": "other"}, "spec": {"containers": [{"name": "a", "image": "example.invalid/x"}]}}
    scene.client.create(PODS, other)
    with quota(scene, {"pods": "1"}):
        scene.kubelet.finish(first, "Failed")
        scene.tenant("next", 4)
        eventually(lambda: "NotStarted" in scene.reasons("stuck"), impatient.log)
        why = eventually(lambda: scene.status("stuck").get("notStartedWhy"), impatient.log)
        assert "exceeded quota: small" in why, why
        scene.client.delete(f"{PODS}/other", {"gracePeriodSeconds": 0})
        scene.running_pod("next")
        assert "exceeded quota: small" in scene.phase("stuck", "Waiting")["message"]


def test_a_tenant_whose_job_is_refused_says_why_and_stands_in_nobodys_way(impatient: Operator, scene: Scene) -> None:
    scene.node("n0", 4)
    scene.pool()
    taken = {"metadata": {"name": "taken"}, "spec": tenant_manifest("x")["spec"]["template"]["spec"]}
    taken["spec"] = {**taken["spec"], "suspend": True}
    taken["spec"]["template"]["spec"]["restartPolicy"] = "Never"
    scene.client.create(JOBS, taken)
    for name in ("bad", "odd", "taken"):
        thing = tenant_manifest(name, 4, priority=900)
        within = thing["spec"]["template"]["spec"]
        if name == "bad":
            within["backoffLimit"] = -1
        if name == "odd":
            within["template"]["metadata"] = "text"
        scene.client.create(TENANTS, thing)
    scene.tenant("good", 4)
    scene.running_pod("good")
    for name, why in (("bad", "backoffLimit"), ("odd", "no Job can be made"), ("taken", "already exists")):
        eventually(lambda name=name: "Refused" in scene.reasons(name), impatient.log)  # type: ignore[misc]
        assert why in scene.phase(name, "Waiting")["message"]
    assert "ownerReferences" not in scene.client.get(f"{JOBS}/taken")["metadata"]
    refusals = impatient.metric("blink_operator_failures_total")
    stays(lambda: impatient.metric("blink_operator_failures_total") == refusals, scene)


def test_a_deadline_that_no_clock_shows_is_said_to_be_none_and_holds_nobody_up(
    operator: Operator, scene: Scene
) -> None:
    scene.node("n0", 4)
    scene.pool()
    scene.tenant("odd", 1, deadline="0000-01-01T00:00:00Z")
    scene.tenant("good", 1)
    scene.running_pod("good")
    assert "0000-01-01" in scene.phase("odd", "Waiting")["message"]
    assert not scene.pods("odd")
