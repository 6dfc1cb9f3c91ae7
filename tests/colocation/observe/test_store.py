"""What watches show becomes what decisions see: who holds which cores, and nothing older than what is known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from services.colocation.decision.model import Cluster, Key, Node, Outcome, Placement, Tenant
from services.colocation.errors import InvalidObjectError
from services.colocation.names import CORES_ANNOTATION, POOLS, QUEUE_LABEL, TENANTS
from services.colocation.observe.objects import NO_POD
from services.colocation.observe.quantities import millicores, pod_millicores
from services.colocation.observe.store import Store
from tests.colocation.objects import Json, job, newer, node, pod, pool, tenant, tenant_pod

NOW = datetime(2026, 3, 2, 13, tzinfo=UTC)
GATEWAY = {"app.kubernetes.io/part-of": "blink", "app.kubernetes.io/component": "gateway"}


def filled(*pods: Json, of_job: Json | None = None) -> Store:
    store = Store()
    store.set_node(node(), gone=False)
    store.set_pool(pool(), gone=False)
    store.set_tenant(tenant(), gone=False)
    if of_job is not None:
        store.set_job(of_job, gone=False)
    for each in pods:
        store.set_pod(each, gone=False)
    return store


def look(store: Store) -> Cluster:
    return store.cluster(NOW, {}, resizable=True)


def only_node(store: Store) -> Node:
    return look(store).nodes[0]


def only_tenant(store: Store) -> Tenant:
    return look(store).tenants[0]


def test_cores_are_counted_for_serving_for_tenants_that_leave_and_for_all_others() -> None:
    store = filled(
        pod("gateway", cpu="3", labels=GATEWAY),
        pod("system", cpu="250m"),
        tenant_pod(cpu="2", name="old", deletionTimestamp="2026-03-02T12:59:00Z"),
        tenant_pod(cpu="4"),
        of_job=job(suspend=False, node="n0", cores=4),
    )
    seen = only_node(store)
    assert (seen.serving, seen.others, seen.leaving) == (3000, 250, 2000)


def test_a_pod_of_blinks_name_that_is_none_of_its_serving_parts_counts_as_any_other() -> None:
    assert only_node(filled(pod("x", labels={"app.kubernetes.io/part-of": "blink"}))).others == 1000


@pytest.mark.parametrize("how", ["ended", "gone", "moved"])
def test_a_pod_that_holds_nothing_any_more_is_not_counted(how: str) -> None:
    one = pod("x")
    store = filled(one)
    if how == "ended":
        store.set_pod(newer(one, status={"phase": "Succeeded"}), gone=False)
    elif how == "gone":
        store.set_pod(one, gone=True)
    else:
        store.set_pod(newer(one, spec={**one["spec"], "nodeName": "elsewhere"}), gone=False)
    assert only_node(store).others == 0


def test_pods_of_a_job_that_was_just_suspended_leave_before_anything_marks_them() -> None:
    store = filled(tenant_pod(cpu="4"), of_job=job(suspend=True, node="n0", cores=4))
    assert only_node(store).leaving == 4000
    assert only_tenant(store).lingering


def test_pods_of_a_job_that_had_the_same_name_before_are_not_this_ones() -> None:
    old = tenant_pod(cpu="4", ownerReferences=[{"uid": "another"}])
    store = filled(old, of_job=job(suspend=False, node="n1", cores=2))
    assert only_node(store).leaving == 4000
    assert only_tenant(store).placement == Placement("n1", 2)
    assert only_tenant(store).pod_pending


def test_a_resized_pod_knows_better_than_its_job_how_many_cores_it_has() -> None:
    store = filled(tenant_pod(cpu="6"), of_job=job(suspend=False, node="n0", cores=2))
    assert only_tenant(store).placement == Placement("n0", 6)
    assert not only_tenant(store).pod_pending


def test_only_a_pod_whose_kubelet_reports_its_containers_resources_can_be_resized() -> None:
    one = tenant_pod()
    released = job(suspend=False, node="n0")
    assert not only_tenant(filled(one, of_job=released)).resizable
    reports = [{"name": "main", "resources": {"requests": {"cpu": "2"}}}]
    assert only_tenant(filled({**one, "status": {"containerStatuses": reports}}, of_job=released)).resizable


def test_a_pod_whose_resize_the_kubelet_refused_keeps_what_it_has_and_is_not_asked_again() -> None:
    has = [{"name": "main", "resources": {"requests": {"cpu": "6"}}}]
    refused = [{"type": "PodResizePending", "status": "True", "reason": "Infeasible"}]
    one = {**tenant_pod(cpu="2"), "status": {"containerStatuses": has, "conditions": refused}}
    seen = only_tenant(filled(one, of_job=job(suspend=False, node="n0", cores=6)))
    assert seen.placement == Placement("n0", 6)
    assert not seen.resizable
    silent = {**one, "status": {"containerStatuses": [{"name": "main"}], "conditions": refused}}
    assert only_tenant(filled(silent, of_job=job(suspend=False, node="n0", cores=6))).placement == Placement("n0", 2)
    later = {**one, "status": {"containerStatuses": has, "conditions": [{**refused[0], "reason": "Deferred"}]}}
    assert only_tenant(filled(later, of_job=job(suspend=False, node="n0", cores=6))).resizable


def test_since_when_a_pod_waits_to_start_is_its_own_age_or_its_jobs() -> None:
    released = job(suspend=False, node="n0", startTime="2026-03-02T12:30:00Z")
    forbidden = only_tenant(filled(of_job=released))
    assert forbidden.pending_since == datetime(2026, 3, 2, 12, 30, tzinfo=UTC)
    told = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available: 1 Insufficient memory."}
    one = {**tenant_pod(node=""), "status": {"phase": "Pending", "conditions": [told]}}
    unscheduled = only_tenant(filled(one, of_job=released))
    assert (unscheduled.pending_since, unscheduled.pending_why) == (
        datetime(2026, 3, 2, 12, tzinfo=UTC),
        told["message"],
    )
    assert only_tenant(filled(tenant_pod(), of_job=released)).pending_since is None


@pytest.mark.parametrize(
    "status",
    [
        {"active": 1},  # the pod has just ended, and the Job's controller has not looked yet
        {"uncountedTerminatedPods": {"succeeded": ["uid"]}},
        {"terminating": 1},
    ],
    ids=str,
)
def test_a_job_that_has_a_pod_yet_is_not_waiting_to_start(status: Json) -> None:
    had = job(suspend=False, node="n0", startTime="2026-03-02T12:30:00Z", **status)
    store = filled(tenant_pod(), of_job=had)
    store.set_pod(newer(tenant_pod(), status={"phase": "Succeeded"}), gone=False)
    seen = only_tenant(store)
    assert seen.pod_pending
    assert seen.pending_since is None


@pytest.mark.parametrize(
    ("failed", "backs_off"), [(0, 0), (1, 10), (2, 20), (5, 160), (7, 600), (10_000, 600)], ids=str
)
def test_a_job_without_a_pod_waits_since_it_may_have_one_again(failed: int, backs_off: int) -> None:
    had = job(suspend=False, node="n0", startTime="2026-03-02T12:00:00Z", failed=failed)
    had["metadata"]["managedFields"] = [
        {"manager": "kube-controller-manager", "subresource": "status", "time": "2026-03-02T12:30:00Z"},
        {"manager": "operator", "time": "2026-03-02T12:45:00Z"},
    ]
    seen = only_tenant(filled(of_job=had))
    assert seen.pending_since == datetime(2026, 3, 2, 12, 30, tzinfo=UTC) + timedelta(seconds=backs_off)
    assert seen.pending_why == NO_POD


def test_a_job_whose_release_its_controller_has_not_seen_is_not_waiting_to_start() -> None:
    released = job(suspend=False, node="n0", conditions=[{"type": "Suspended", "status": "True"}])
    queued_long_ago = {"manager": "kube-controller-manager", "subresource": "status", "time": "2026-03-02T12:00:00Z"}
    released["metadata"]["managedFields"] = [queued_long_ago]
    seen = only_tenant(filled(of_job=released))
    assert seen.pod_pending
    assert seen.pending_since is None


def test_a_job_that_kueue_took_back_is_not_waiting_to_start() -> None:
    held = job(node="n0", startTime="2026-03-02T12:30:00Z", uncountedTerminatedPods={})
    held["metadata"]["labels"][QUEUE_LABEL] = "queue"
    seen = only_tenant(filled(of_job=held))
    assert seen.held_by_kueue
    assert seen.pending_since is None


def test_a_job_that_somebody_released_by_hand_is_not_placed() -> None:
    assert only_tenant(filled(of_job=job(suspend=False))).placement is None


def test_how_a_job_ended_is_seen_and_remembered_when_the_job_is_gone() -> None:
    done = job(suspend=False, node="n0", conditions=[{"type": "Complete", "status": "True"}])
    assert only_tenant(filled(of_job=done)).outcome is Outcome.SUCCEEDED
    store = filled()
    store.set_tenant(newer(tenant(), status={"phase": "Failed"}), gone=False)
    assert only_tenant(store).outcome is Outcome.FAILED


@pytest.mark.parametrize(
    "text", ["2026-12-31T23:59:60Z", "2026-12-31T23:59:59+99:99", "0000-01-01T00:00:00Z", "2026-12-31T23:59:59x5Z"]
)
def test_a_deadline_that_the_api_server_takes_and_no_clock_shows_is_said_to_be_none(text: str) -> None:
    store = filled()
    store.set_tenant(newer(tenant(deadline=text)), gone=False)
    seen = only_tenant(store)
    assert seen.deadline is None
    assert text in seen.invalid


@pytest.mark.parametrize("cores", ["", "0", "-1", "two", "1.5", "9" * 40])
def test_a_job_whose_annotations_somebody_has_spoilt_is_not_placed(cores: str) -> None:
    spoilt = job(suspend=False, node="n0")
    spoilt["metadata"]["annotations"][CORES_ANNOTATION] = cores
    store = filled(tenant_pod(cpu="2"), of_job=spoilt)
    assert only_tenant(store).placement is None
    assert only_node(store).leaving == 2000


def test_a_pod_that_asks_for_nothing_has_what_its_job_says() -> None:
    one = tenant_pod()
    del one["spec"]["containers"][0]["resources"]
    assert only_tenant(filled(one, of_job=job(suspend=False, node="n0", cores=3))).placement == Placement("n0", 3)


def test_a_job_of_a_tenants_name_that_was_not_made_for_it_is_none_of_its() -> None:
    foreign = job(suspend=False, node="n0")
    foreign["metadata"]["ownerReferences"] = [{"uid": "another"}]
    store = filled(tenant_pod(), of_job=foreign)
    assert not only_tenant(store).has_job
    assert store.job_of(Key("batch", "a")) is None


def test_what_a_tenants_pod_holds_beside_its_grant_counts_as_others_do() -> None:
    one = tenant_pod(cpu="2")
    one["spec"]["overhead"] = {"cpu": "250m"}
    seen = only_node(filled(one, of_job=job(suspend=False, node="n0")))
    assert (seen.others, seen.leaving) == (250, 0)


def test_what_went_while_nobody_watched_is_forgotten_and_what_came_since_is_not() -> None:
    store = filled(pod("ghost"), pod("stays"), tenant_pod(), of_job=job(suspend=False, node="n0"))
    store.set_pod(newer(newer(pod("new"))), gone=False)
    assert store.retain("pods", {Key("batch", "stays")}, version=2) == 2
    assert (only_node(store).others, list(store.pods_of(Key("batch", "a")))) == (2000, [])
    for plural, empty in (("jobs", store.jobs), (TENANTS, store.tenants), (POOLS, store.pools), ("nodes", store.nodes)):
        assert store.retain(plural, set(), version=0) == 0
        assert store.retain(plural, set(), version=1) == 1
        assert not empty


@pytest.mark.parametrize("how", ["ended", "gone", "swept"])
def test_tenants_that_have_run_leave_nothing_in_the_books(how: str) -> None:
    one = tenant_pod()
    store = filled(one)
    if how == "swept":
        store.retain("pods", set(), version=1)
    else:
        ended = newer(one, status={"phase": "Succeeded"})
        store.set_pod(ended if how == "ended" else one, gone=how == "gone")
        store.set_pod(ended, gone=True)
    assert not store._tenant_pods


def test_an_older_state_of_any_pod_does_not_undo_a_newer_one() -> None:
    one = pod("x", cpu="1")
    store = filled(newer({**one, "spec": {**one["spec"], "nodeName": "elsewhere"}}))
    assert not store.set_pod(one, gone=False)
    assert only_node(store).others == 0


def test_a_watch_that_lags_does_not_undo_what_a_write_has_shown() -> None:
    store = filled(of_job=job(suspend=True))
    store.set_job(newer(job(suspend=False, node="n0")), gone=False)
    assert not store.set_job(job(suspend=True), gone=False)
    assert only_tenant(store).placement == Placement("n0", 2)


def test_the_late_end_of_an_object_does_not_remove_its_successor() -> None:
    store = filled(of_job=job(suspend=True))
    old = job()
    assert not store.set_job({**old, "metadata": {**old["metadata"], "uid": "earlier"}}, gone=True)
    assert only_tenant(store).has_job


def test_the_late_end_of_a_node_or_a_pod_does_not_remove_its_successor() -> None:
    store = filled(newer(newer(pod("db-0", uid="second"))))
    assert not store.set_pod(newer(pod("db-0", uid="first")), gone=True)
    again = {**node(), "metadata": {**node()["metadata"], "uid": "second", "resourceVersion": "3"}}
    store.set_node(again, gone=False)
    assert not store.set_node(newer(node()), gone=True)
    assert only_node(store).others == 1000
    assert store.set_node(again, gone=True)


def test_a_kubelets_heartbeat_is_no_reason_to_decide_anew() -> None:
    store = Store()
    first = node()
    assert store.set_node(first, gone=False)
    beat = {**first["status"], "images": ["x"]}
    assert not store.set_node(newer(first, status=beat), gone=False)
    assert store.set_node(newer(newer(first), spec={"unschedulable": True}), gone=False)
    assert not only_node(store).schedulable


@pytest.mark.parametrize("bad", [node(ready=False), node(unschedulable=True)])
def test_nodes_that_take_no_pods_are_told_apart(bad: Json) -> None:
    store = Store()
    store.set_node(bad, gone=False)
    assert not only_node(store).schedulable


def test_a_pool_with_a_time_zone_that_is_none_says_so() -> None:
    store = filled()
    windows = [{"start": "20:00", "end": "06:00"}]
    store.set_pool(newer(pool(schedule={"timeZone": "Mars/Olympus", "windows": windows})), gone=False)
    (seen,) = look(store).pools
    assert "Mars/Olympus" in seen.invalid
    assert not seen.windows


def test_a_tenant_that_is_being_deleted_is_not_decided_upon() -> None:
    store = filled(tenant_pod(), of_job=job(suspend=False, node="n0"))
    going = tenant()
    going["metadata"]["deletionTimestamp"] = "2026-03-02T12:59:00Z"
    store.set_tenant(newer(going), gone=False)
    assert look(store).tenants == ()
    assert only_node(store).leaving == 2000


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [("2", 2000), ("250m", 250), ("0.1", 100), ("1m", 1), ("100u", 1), (3, 3000), ("1k", 10**6)],
)
def test_quantities_become_millicores_rounded_up(quantity: str | int, expected: int) -> None:
    assert millicores(quantity) == expected


def test_what_is_no_quantity_is_refused_by_name() -> None:
    with pytest.raises(InvalidObjectError, match="'two'"):
        millicores("two")


def container(cpu: str, **more: str) -> Json:
    return {"name": f"c{cpu}", "resources": {"requests": {"cpu": cpu}}, **more}


def test_a_pods_request_is_what_the_scheduler_counts() -> None:
    sidecar = container("1", restartPolicy="Always")
    spec = {"containers": [container("2"), container("500m")], "initContainers": [sidecar, container("3")]}
    assert pod_millicores({"spec": spec}) == 4000  # the init container beside the sidecar, not 2.5 + 1
    assert pod_millicores({"spec": {**spec, "overhead": {"cpu": "250m"}}}) == 4250
    assert pod_millicores({"spec": {**spec, "resources": {"requests": {"cpu": "6"}}}}) == 6000


def test_while_a_pod_is_resized_the_larger_of_both_sizes_counts() -> None:
    now = {"name": "c2", "resources": {"requests": {"cpu": "5"}}}
    assert pod_millicores({"spec": {"containers": [container("2")]}, "status": {"containerStatuses": [now]}}) == 5000
