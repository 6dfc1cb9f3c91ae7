"""The operator against a real API server, with the rights that the chart gives it, real controllers and scheduler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.cluster.conftest import PATHS
from tests.cluster.control_plane import ControlPlane
from tests.cluster.hollow import FIXED, STUBBORN
from tests.cluster.metrics_page import MetricsPage
from tests.cluster.operators import Operator
from tests.cluster.scene import (
    JOBS,
    NODES,
    PODS,
    POOLS,
    STABLE_SECONDS,
    TENANTS,
    Scene,
    eventually,
    pool_manifest,
    stays,
    tenant_manifest,
)
from tests.deploy.chart.rendering import rendered

GUARD = {"ttftP99Milliseconds": 200, "windowSeconds": 5, "restoreAfterSeconds": 5}


def test_a_tenant_runs_on_freed_cores_and_its_end_is_seen(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 8)
    scene.pool(baseline=2)
    scene.tenant("a", 2, 4)
    status = scene.phase("a", "Running")
    assert (status["node"], status["cores"]) == ("n0", 4)
    pod = scene.running_pod("a")
    assert pod["spec"]["nodeName"] == "n0"
    assert pod["status"]["qosClass"] == "Guaranteed"
    assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "4"
    assert pod["spec"]["priority"] < 0
    eventually(lambda: scene.pool_status().get("usedCores") == 4)
    assert scene.pool_status()["freedCores"] == 6
    scene.kubelet.finish(pod)
    scene.phase("a", "Succeeded")
    eventually(lambda: scene.pool_status()["usedCores"] == 0)
    assert scene.reasons("a")[:2] == ["Queued", "Released"]
    assert operator.metric("blink_operator_failures_total") == 0, operator.log()


def test_twenty_tenants_share_what_is_free_and_all_have_their_turn(operator: Operator, scene: Scene) -> None:
    for name, cores in (("n0", 8), ("n1", 4)):
        scene.node(name, cores)
    for index in range(20):
        scene.tenant(f"t{index:02}", 1 + index % 3)
    scene.pool(baseline=1)  # 7 + 3, for all of them at once
    eventually(lambda: sum(scene.cores_by_node().values()) >= 8, operator.log)  # nothing ends before it is shared
    ended: set[str] = set()

    def work() -> bool:
        held = scene.cores_by_node()
        assert held.get("n0", 0) <= 7, held
        assert held.get("n1", 0) <= 3, held
        for pod in scene.pods():
            name = pod["metadata"]["labels"]["blink.dev/tenant"]
            if pod["status"].get("phase") == "Running" and name not in ended:
                scene.kubelet.finish(pod)
                ended.add(name)
        return len(ended) == 20

    eventually(work, lambda: f"{sorted(ended)} {operator.log()}")
    for index in range(20):
        scene.phase(f"t{index:02}", "Succeeded")


def test_why_one_waits_is_said_in_its_status_and_its_place_in_the_queue(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 4)
    scene.pool()
    scene.tenant("first", 4)
    scene.phase("first", "Running")
    scene.tenant("second", 2)
    scene.tenant("giant", 64)
    assert "no node of TenantPool p has room for 2 cores" in scene.phase("second", "Waiting")["message"]
    eventually(lambda: scene.status("second").get("position") in {1, 2})
    assert "largest node of TenantPool p frees 4" in scene.phase("giant", "Waiting")["message"]
    admitted = {c["type"]: c for c in scene.status("giant")["conditions"]}["Admitted"]
    assert (admitted["status"], admitted["reason"]) == ("False", "TooLarge")


def test_running_pods_are_resized_in_place_for_a_newcomer_and_grow_no_further(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 8)
    scene.pool()
    scene.tenant("a", 2, 8)
    scene.phase("a", "Running")
    first = scene.running_pod("a")
    scene.tenant("b", 4)
    scene.phase("b", "Running")
    scene.running_pod("b")
    eventually(lambda: scene.cores_by_node() == {"n0": 8}, lambda: f"{scene.cores_by_node()} {operator.log()}")
    shrunk = scene.running_pod("a")
    assert shrunk["metadata"]["uid"] == first["metadata"]["uid"]
    assert shrunk["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "4"
    assert "ShrunkForRoom" in scene.reasons("a")


def test_where_the_kubelet_refuses_to_resize_the_newcomer_waits_and_who_runs_runs_on(
    operator: Operator, scene: Scene
) -> None:
    scene.node("n0", 8)
    scene.pool()
    scene.tenant("a", 2, 8, labels={FIXED: "yes"})
    first = scene.running_pod("a")
    assert first["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "8"
    scene.tenant("b", 4, priority=9)
    eventually(lambda: "ShrunkForRoom" in scene.reasons("a"), operator.log)
    eventually(lambda: "NoRoom" in str(scene.status("b").get("conditions")), lambda: f"{scene.status('b')}")
    stays(lambda: scene.status("b")["phase"] == "Waiting" and scene.status("a")["cores"] == 8, scene)
    assert scene.running_pod("a")["metadata"]["uid"] == first["metadata"]["uid"]
    scene.kubelet.finish(scene.running_pod("a"))
    scene.running_pod("b")


def test_preemption_waits_until_the_victims_pod_has_ended(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 4)
    scene.pool()
    scene.tenant("low", 4, labels={STUBBORN: "yes"})
    victim = scene.running_pod("low")
    scene.tenant("urgent", 4, priority=10, preemption="LowerPriority")
    eventually(lambda: "Preempted" in scene.reasons("low"), operator.log)
    eventually(lambda: any("deletionTimestamp" in p["metadata"] for p in scene.pods("low")))
    stays(lambda: not scene.pods("urgent"), scene)
    scene.client.delete(f"/api/v1/namespaces/batch/pods/{victim['metadata']['name']}", {"gracePeriodSeconds": 0})
    scene.phase("urgent", "Running")


def test_a_broken_slo_shrinks_then_suspends_then_evicts_and_calm_brings_all_back_without_flapping(
    operator: Operator, scene: Scene
) -> None:
    with MetricsPage() as page:
        scene.node("n0", 8)
        scene.pool(sloGuard={**GUARD, "metricsURLs": [page.url]})
        scene.tenant("a", 2, 8)
        eventually(lambda: scene.pool_status().get("guard"))
        page.serve(0.01)
        scene.running_pod("a")
        stages: list[str] = []

        def watch(seconds: float, until: str) -> bool:
            page.serve(seconds, 50)
            stage = scene.pool_status()["guard"]["stage"]
            if not stages or stages[-1] != stage:
                stages.append(stage)
            return bool(stage == until)

        eventually(lambda: watch(1.0, "Evict"), lambda: f"{stages} {operator.log()}")
        assert [s for s in stages if s != "Normal"] == ["Shrink", "SuspendHalf", "SuspendAll", "Evict"]
        eventually(lambda: not scene.pods("a"))
        told = scene.reasons("a")
        assert "ShrunkForSLO" in told, operator.log()
        assert told.index("ShrunkForSLO") < told.index("SuspendedForSLO")
        assert scene.conditions()["SLOHealthy"] == "False"
        stages.clear()
        eventually(lambda: watch(0.01, "Normal"), lambda: f"{stages} {operator.log()}")
        assert stages[-4:] == ["SuspendAll", "SuspendHalf", "Shrink", "Normal"]
        scene.running_pod("a")
        assert not scene.client.get(f"{NODES}/n0")["spec"].get("taints")


def test_while_the_metrics_are_away_nobody_is_let_in_and_nobody_is_thrown_out(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 8)
    with MetricsPage() as page:
        scene.pool(sloGuard={**GUARD, "metricsURLs": [page.url]})
        scene.tenant("a", 2)
        scene.running_pod("a")
    eventually(
        lambda: {c["type"]: c["status"] for c in scene.pool_status()["conditions"]}["MetricsAvailable"] == "False"
    )
    scene.tenant("b", 2)
    assert "lets nobody in" in scene.phase("b", "Waiting")["message"]
    stays(lambda: len(scene.pods("a")) == 1 and not scene.pods("b"), scene)


def test_a_drained_tenant_goes_to_another_node(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 4)
    scene.pool()
    scene.tenant("a", 2)
    pod = scene.running_pod("a")
    scene.node("n1", 4)
    scene.client.patch(f"{NODES}/n0", {"spec": {"unschedulable": True}})
    stays(lambda: scene.cores_by_node() == {"n0": 2}, scene)  # cordoned: what runs goes on
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": pod["metadata"]}
    scene.client.create(f"/api/v1/namespaces/batch/pods/{pod['metadata']['name']}/eviction", eviction)
    eventually(lambda: scene.cores_by_node() == {"n1": 2}, lambda: f"{scene.cores_by_node()} {operator.log()}")
    scene.phase("a", "Running")
    assert "NodeLost" in scene.reasons("a")


def test_of_two_pools_that_claim_a_node_the_older_has_it_and_the_newer_says(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 4)
    scene.pool("p")
    eventually(lambda: scene.pool_status("p").get("nodes") == 1)
    time.sleep(1.1)  # ages are in whole seconds
    scene.pool("late")
    eventually(lambda: scene.pool_status("late").get("conditions"))
    conditions = {c["type"]: c for c in scene.pool_status("late")["conditions"]}
    assert conditions["Conflicted"]["status"] == "True"
    assert "n0 (of 'p')" in conditions["Conflicted"]["message"]
    assert scene.conditions("p")["Conflicted"] == "False"
    scene.client.delete(f"{POOLS}/p")
    eventually(lambda: scene.pool_status("late").get("nodes") == 1)


def test_a_pool_whose_time_zone_becomes_none_says_so_and_keeps_whom_it_has(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 4)
    scene.pool()
    scene.tenant("a", 1)
    scene.running_pod("a")
    schedule = {"timeZone": "Mars/Olympus", "windows": [{"start": "20:00", "end": "06:00"}]}
    scene.client.patch(f"{POOLS}/p", {"spec": {"schedule": schedule}})
    eventually(lambda: "Mars/Olympus" in scene.pool_status()["conditions"][0]["message"], operator.log)
    scene.tenant("b", 1)
    assert "Mars/Olympus" in scene.phase("b", "Waiting")["message"]
    stays(lambda: len(scene.pods("a")) == 1 and not scene.pods("b"), scene)
    scene.client.patch(f"{POOLS}/p", {"spec": {"schedule": None}})
    scene.running_pod("b")


def test_a_tenant_that_is_not_done_by_its_deadline_fails(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 4)
    scene.pool()
    soon = (datetime.now(UTC) + timedelta(seconds=6)).isoformat(timespec="seconds").replace("+00:00", "Z")
    scene.tenant("late", 2, deadline=soon)
    scene.running_pod("late")
    scene.phase("late", "Failed")
    eventually(lambda: not scene.pods("late") and not scene.client.items(JOBS))
    stays(lambda: "deadline" in scene.status("late")["message"], scene)  # also when nothing else tells any more


def test_a_tenant_whose_job_gives_up_says_what_kubernetes_says_of_it(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 4)
    scene.pool()
    thing = tenant_manifest("fails", 2)
    thing["spec"]["template"]["spec"]["backoffLimit"] = 0
    scene.client.create(TENANTS, thing)
    scene.kubelet.finish(scene.running_pod("fails"), "Failed")
    assert "backoff limit" in scene.phase("fails", "Failed")["message"]
    eventually(lambda: scene.pool_status()["usedCores"] == 0)


def test_a_tenant_and_a_pool_that_are_deleted_leave_nothing(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 4)
    scene.pool()
    scene.tenant("a", 2)
    scene.tenant("b", 2)
    scene.running_pod("a")
    scene.running_pod("b")
    scene.client.delete(f"{TENANTS}/a")
    eventually(lambda: scene.client.find(f"{TENANTS}/a") is None, operator.log)
    assert not scene.pods("a")
    scene.client.delete(f"{POOLS}/p")
    eventually(lambda: scene.client.find(f"{POOLS}/p") is None, operator.log)
    assert "PoolDeleted" in scene.reasons("b")
    # It waits already while its pool is on its way out; the next look finds none.
    eventually(lambda: scene.status("b").get("message") == "there is no TenantPool 'p'", operator.log)
    scene.phase("b", "Waiting")


def test_killed_in_the_midst_of_its_work_it_goes_on_where_it_was(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 16)
    scene.pool()
    scene.tenant("before", 2)
    survivor = scene.running_pod("before")["metadata"]["uid"]
    for index in range(12):
        scene.tenant(f"t{index}", 1)
    operator.kill()
    stays(lambda: len(scene.pods("before")) == 1, scene)
    operator.start()
    for index in range(12):
        scene.running_pod(f"t{index}")
    assert scene.running_pod("before")["metadata"]["uid"] == survivor
    assert len(scene.client.items(JOBS)) == 13
    assert sum(scene.cores_by_node().values()) == 14


def test_an_api_server_that_restarts_is_waited_for(operator: Operator, scene: Scene, plane: ControlPlane) -> None:
    scene.node("n0", 4)
    scene.pool()
    scene.tenant("a", 1)
    scene.running_pod("a")
    plane.stop_api_server()
    time.sleep(2)  # long enough for watches and the lease to notice
    plane.start_api_server()
    scene.tenant("b", 1)
    eventually(lambda: scene.status("b").get("phase") == "Running", operator.log)
    scene.running_pod("b")
    assert len(scene.pods("a")) == 1


def test_a_pod_that_went_while_the_operator_could_not_watch_is_not_in_its_books_for_ever(
    plane: ControlPlane, scene: Scene, tmp_path: Path
) -> None:
    account = plane.kubeconfig_of("serving", "blink-operator")
    with Operator(account, tmp_path, sweep="2") as operator:
        scene.node("n0", 4)
        scene.pool()
        container = {"name": "a", "image": "example.invalid/x", "resources": {"requests": {"cpu": "3"}}}
        pod = {"metadata": {"name": "other"}, "spec": {"nodeName": "n0", "containers": [container]}}
        scene.client.create(PODS, pod)
        eventually(lambda: scene.pool_status().get("freedCores") == 1, operator.log)
        # Its watch will be too old for a server that has begun anew, and the list that it gets then lacks the pod.
        operator.send(signal.SIGSTOP)
        plane.stop_api_server()
        plane.start_api_server()
        scene.client.delete(f"{PODS}/other", {"gracePeriodSeconds": 0})
        operator.send(signal.SIGCONT)
        eventually(lambda: scene.pool_status().get("freedCores") == 4, operator.log)
        scene.clear()


def test_a_node_that_vanishes_takes_its_tenants_along_and_they_start_elsewhere(
    operator: Operator, scene: Scene
) -> None:
    scene.node("n0", 4)
    scene.pool()
    scene.tenant("a", 2)
    pod = scene.running_pod("a")
    scene.node("n1", 4)
    scene.client.delete(f"{NODES}/n0")
    eventually(lambda: scene.cores_by_node().get("n1") == 2, lambda: f"{scene.status('a')} {operator.log()}")
    assert "NodeLost" in scene.reasons("a")
    eventually(lambda: pod["metadata"]["uid"] not in {each["metadata"]["uid"] for each in scene.pods("a")})


def test_a_pool_that_is_edited_under_load_has_no_tenant_hold_what_serving_was_promised(
    operator: Operator, scene: Scene
) -> None:
    for name in ("n0", "n1"):
        scene.node(name, 8)
    scene.pool()
    for index in range(8):
        scene.tenant(f"t{index}", 2)
    eventually(lambda: sum(scene.cores_by_node().values()) == 16, operator.log)
    for baseline, allowed in ((6, 2), (0, 8), (5, 2)):
        scene.client.patch(f"{POOLS}/p", {"spec": {"serving": {"baselineCores": baseline}}})
        wanted = {"n0": allowed, "n1": allowed}
        eventually(lambda w=wanted: scene.cores_by_node() == w, lambda: f"{scene.cores_by_node()} {operator.log()}")  # type: ignore[misc]
    # The pool gives a node up: nobody stays there.
    scene.client.patch(f"{POOLS}/p", {"spec": {"nodeSelector": {"kubernetes.io/hostname": "n1"}}})
    eventually(lambda: scene.cores_by_node() == {"n1": 2}, lambda: f"{scene.cores_by_node()} {operator.log()}")


def test_one_that_is_deleted_in_the_moment_of_its_release_leaves_nothing(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 8)
    scene.pool()
    for index in range(8):
        scene.tenant(f"t{index}", 1)
        time.sleep(0.05 * index)
        scene.client.delete(f"{TENANTS}/t{index}")
    eventually(lambda: not scene.client.items(TENANTS), operator.log)
    eventually(lambda: not scene.client.items(JOBS) and not scene.pods(), operator.log)
    eventually(lambda: scene.pool_status().get("usedCores") == 0)
    scene.tenant("whole", 8)
    scene.running_pod("whole")


def test_a_range_that_is_cut_shrinks_the_pod_in_place(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 8)
    scene.pool()
    scene.tenant("a", 2, 8)
    first = scene.running_pod("a")
    scene.client.patch(f"{TENANTS}/a", {"spec": {"cores": {"max": 3}}})
    eventually(lambda: scene.cores_by_node() == {"n0": 3}, operator.log)
    assert scene.running_pod("a")["metadata"]["uid"] == first["metadata"]["uid"]
    eventually(lambda: "RangeChanged" in scene.reasons("a"), operator.log)


def test_of_two_replicas_one_acts_and_the_other_takes_over(
    operator: Operator, scene: Scene, plane: ControlPlane, tmp_path: Path
) -> None:
    scene.node("n0", 4)
    scene.pool()
    scene.tenant("a", 1)
    scene.running_pod("a")
    with Operator(plane.kubeconfig_of("serving", "blink-operator"), tmp_path, "two") as second:
        stays(
            lambda: (operator.metric("blink_operator_leading"), second.metric("blink_operator_leading")) == (1, 0),
            scene,
        )
        operator.kill()
        eventually(lambda: second.metric("blink_operator_leading") == 1, second.log)
        scene.tenant("b", 1)
        scene.running_pod("b")
        assert len(scene.client.items(JOBS)) == 2


def test_a_cluster_at_rest_costs_no_writes(operator: Operator, scene: Scene) -> None:
    scene.node("n0", 8)
    scene.pool()
    for index in range(10):
        scene.tenant(f"t{index}", 1)
    eventually(lambda: sum(scene.cores_by_node().values()) == 8)
    eventually(lambda: sum(scene.status(f"t{i}").get("phase") == "Waiting" for i in range(10)) == 2)

    def versions() -> list[str]:
        return [t["metadata"]["resourceVersion"] for t in (*scene.client.items(TENANTS), *scene.client.items(POOLS))]

    def at_rest() -> bool:
        before = versions()
        time.sleep(1.5)
        return before == versions()

    eventually(at_rest, operator.log)
    before = versions()
    time.sleep(3 * STABLE_SECONDS / 2)  # nine rounds
    assert versions() == before


def test_uninstalling_deletes_every_tenant_and_pool(operator: Operator, scene: Scene, plane: ControlPlane) -> None:
    scene.node("n0", 4)
    scene.pool()
    scene.tenant("a", 1)
    scene.running_pod("a")
    environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig())}
    command = [sys.executable, "-m", "services.colocation.uninstall"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not scene.client.items(TENANTS)
    assert not scene.client.items(POOLS)
    eventually(lambda: not scene.pods() and not scene.client.items(JOBS))


def test_uninstalling_needs_no_operator_that_works(scene: Scene, plane: ControlPlane) -> None:
    for thing in rendered("cpu-demo"):
        if thing["metadata"]["name"] == "blink-uninstall" and thing["kind"] in PATHS:
            scene.client.create(PATHS[thing["kind"]].format("serving"), thing)
    finalizers = ["blink.dev/colocation"]
    for path, made in ((POOLS, pool_manifest()), (TENANTS, tenant_manifest("a"))):
        scene.client.create(path, {**made, "metadata": {**made["metadata"], "finalizers": finalizers}})
    environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig_of("serving", "blink-uninstall"))}
    command = [sys.executable, "-m", "services.colocation.uninstall", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not scene.client.items(TENANTS)
    assert not scene.client.items(POOLS)
