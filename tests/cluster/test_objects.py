"""The API server refuses every TenantPool and Tenant that makes no sense, naming the field."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.cluster.control_plane import Client, ControlPlane, Json
from tests.cluster.scene import POOLS, TENANTS, Scene, pool_manifest, tenant_manifest

GUARD = {"metricsURLs": ["http://gateway:8000/metrics"], "ttftP99Milliseconds": 200}
NIGHT = {"start": "22:00", "end": "06:00"}

GOOD_POOLS = {
    "the least": {},
    "all of it": {
        "ceilings": {"cpuPercent": 50, "memoryBandwidthMBps": 100_000},
        "sloGuard": {**GUARD, "tpotP99Milliseconds": 50, "windowSeconds": 30, "restoreAfterSeconds": 60},
        "evictionOrder": "NewestFirst",
        "schedule": {"timeZone": "Europe/Berlin", "windows": [{**NIGHT, "days": ["Mon", "Fri"]}]},
    },
}
BAD_POOLS: list[tuple[str, Json]] = [
    ("nodeSelector", {"nodeSelector": {}}),
    ("nodeSelector", {"nodeSelector": {"pool": 1}}),
    ("serving", {"serving": {}}),
    ("baselineCores", {"serving": {"baselineCores": -1}}),
    ("baselineCores", {"serving": {"baselineCores": "2"}}),
    ("reservedCores", {"serving": {"baselineCores": 0, "reservedCores": 1.5}}),
    ("cpuPercent", {"ceilings": {"cpuPercent": 0}}),
    ("cpuPercent", {"ceilings": {"cpuPercent": 101}}),
    ("memoryBandwidthMBps", {"ceilings": {"memoryBandwidthMBps": 0}}),
    ("ttftP99Milliseconds", {"sloGuard": {"metricsURLs": ["http://x/metrics"]}}),
    ("metricsURLs", {"sloGuard": {"ttftP99Milliseconds": 1}}),
    ("metricsURLs", {"sloGuard": {**GUARD, "metricsURLs": []}}),
    ("metricsURLs", {"sloGuard": {**GUARD, "metricsURLs": ["file:///etc/passwd"]}}),
    ("metricsURLs", {"sloGuard": {**GUARD, "metricsURLs": ["http://x/m", "http://x/m"]}}),
    ("ttftP99Milliseconds", {"sloGuard": {**GUARD, "ttftP99Milliseconds": 0}}),
    ("tpotP99Milliseconds", {"sloGuard": {**GUARD, "tpotP99Milliseconds": -5}}),
    ("windowSeconds", {"sloGuard": {**GUARD, "windowSeconds": 4}}),
    ("recoveryPercent", {"sloGuard": {**GUARD, "recoveryPercent": 100}}),
    ("restoreAfterSeconds", {"sloGuard": {**GUARD, "windowSeconds": 60, "restoreAfterSeconds": 59}}),
    ("evictionOrder", {"evictionOrder": "Random"}),
    ("windows", {"schedule": {"windows": []}}),
    ("start", {"schedule": {"windows": [{**NIGHT, "start": "24:00"}]}}),
    ("end", {"schedule": {"windows": [{**NIGHT, "end": "6:00"}]}}),
    ("must differ", {"schedule": {"windows": [{"start": "06:00", "end": "06:00"}]}}),
    ("days", {"schedule": {"windows": [{**NIGHT, "days": ["Monday"]}]}}),
    ("timeZone", {"schedule": {"timeZone": "../etc/passwd", "windows": [NIGHT]}}),
]


def template(**pod: Any) -> Json:
    return {"spec": {"template": {"spec": {"containers": [{"name": "a", "image": "x"}], **pod}}}}


GOOD_TENANTS = {
    "the least": {},
    "all of it": {
        "cores": {"min": 2, "max": 8},
        "priority": 1000,
        "preemption": "LowerPriority",
        "deadline": "2030-01-01T00:00:00Z",
        "memoryBandwidthMBpsPerCore": 2000,
    },
    "a range of one": {"cores": {"min": 3, "max": 3}},
}
BAD_TENANTS: list[tuple[str, Json]] = [
    ("pool", {"pool": ""}),
    ("pool", {"pool": None}),
    ("cores", {"cores": {}}),
    ("min", {"cores": {"min": 0}}),
    ("min", {"cores": {"min": "500m"}}),
    ("max must be at least min", {"cores": {"min": 4, "max": 3}}),
    ("max", {"cores": {"min": 1, "max": 1025}}),
    ("priority", {"priority": -1}),
    ("priority", {"priority": 1001}),
    ("preemption", {"preemption": "Always"}),
    ("deadline", {"deadline": "tomorrow"}),
    ("memoryBandwidthMBpsPerCore", {"memoryBandwidthMBpsPerCore": -1}),
    ("template", {"template": None}),
    ("containers", {"template": template(containers=[])}),
    ("containers", {"template": template(containers=[{"name": "a", "image": "x"}, {"name": "b", "image": "x"}])}),
    ("image", {"template": template(containers=[{"name": "a"}])}),
    ("nodeName", {"template": template(nodeName="n0")}),
    ("restartPolicy", {"template": template(restartPolicy="Always")}),
    ("parallelism", {"template": {"spec": {**template()["spec"], "parallelism": 2}}}),
    ("suspend", {"template": {"spec": {**template()["spec"], "suspend": False}}}),
]


def dry(path: str) -> str:
    """Asks what would happen; strict, so that a field that is unknown is an error."""
    return f"{path}?dryRun=All&fieldValidation=Strict"


@pytest.mark.parametrize("spec", GOOD_POOLS.values(), ids=GOOD_POOLS.keys())
def test_a_pool_that_makes_sense_is_taken(client: Client, spec: Json) -> None:
    client.create(dry(POOLS), pool_manifest(**spec))


@pytest.mark.parametrize("spec", GOOD_TENANTS.values(), ids=GOOD_TENANTS.keys())
def test_a_tenant_that_makes_sense_is_taken(client: Client, spec: Json) -> None:
    thing = tenant_manifest("t")
    thing["spec"].update(spec)
    client.create(dry(TENANTS), thing)


@pytest.mark.parametrize(("named", "spec"), BAD_POOLS)
def test_a_pool_with_a_bad_field_is_refused_by_its_name(client: Client, named: str, spec: Json) -> None:
    thing = pool_manifest()
    thing["spec"].update(copy.deepcopy(spec))
    answer = client.call("POST", dry(POOLS), thing)
    assert answer.status_code == 422, answer.text
    assert named in answer.json()["message"]


@pytest.mark.parametrize(("named", "spec"), BAD_TENANTS)
def test_a_tenant_with_a_bad_field_is_refused_by_its_name(client: Client, named: str, spec: Json) -> None:
    thing = tenant_manifest("t")
    thing["spec"].update(copy.deepcopy(spec))
    answer = client.call("POST", dry(TENANTS), thing)
    assert answer.status_code == 422, answer.text
    assert named in answer.json()["message"]


@pytest.mark.parametrize(("path", "thing"), [(POOLS, pool_manifest()), (TENANTS, tenant_manifest("t"))])
def test_a_field_that_is_unknown_is_refused_to_whoever_asks_for_strictness(
    client: Client, path: str, thing: Json
) -> None:
    answer = client.call("POST", dry(path), {**thing, "spec": {**thing["spec"], "corse": 1}})
    assert answer.status_code == 400
    assert "corse" in answer.text


def test_a_name_that_no_job_could_have_is_refused(client: Client) -> None:
    assert client.call("POST", dry(TENANTS), tenant_manifest("t" * 64)).status_code == 422


def test_a_template_can_not_be_changed_but_priority_and_cores_can(scene: Scene, client: Client) -> None:
    scene.tenant("t")
    client.patch(f"{TENANTS}/t", {"spec": {"priority": 7, "cores": {"min": 2}}})
    answer = client.call("PATCH", f"{TENANTS}/t", {"spec": {"template": template(restartPolicy="OnFailure")}})
    assert answer.status_code == 422
    assert "can't be changed" in answer.text


def test_people_may_do_what_their_role_says_and_nothing_else(plane: ControlPlane) -> None:
    ada, eve = plane.client("ada"), plane.client("eve")
    assert ada.call("POST", dry(TENANTS), tenant_manifest("t")).ok
    assert ada.call("GET", TENANTS).ok
    for path, thing in ((POOLS, pool_manifest()), (TENANTS.replace("batch", "default"), tenant_manifest("t"))):
        assert ada.call("POST", dry(path), thing).status_code == 403
    assert ada.call("PATCH", f"{TENANTS}/t/status", {"status": {"phase": "Running"}}).status_code == 403
    assert ada.call("GET", "/apis/batch/v1/namespaces/batch/jobs").status_code == 403
    assert eve.call("GET", TENANTS).status_code == 403


def test_the_operators_account_may_not_read_secrets_or_touch_serving(plane: ControlPlane) -> None:
    import yaml  # noqa: PLC0415

    config = yaml.safe_load(plane.kubeconfig_of("serving", "blink-operator").read_text())
    operator = Client(plane.server, config["users"][0]["user"]["token"], str(plane.directory / "ca.pem"))
    assert operator.call("GET", TENANTS).ok
    for verb, path in (
        ("GET", "/api/v1/secrets"),
        ("GET", "/api/v1/namespaces/serving/configmaps"),
        ("POST", "/api/v1/namespaces/serving/pods"),
        ("DELETE", "/apis/apps/v1/namespaces/serving/deployments/blink"),
        ("PATCH", "/api/v1/nodes/n0"),
        ("DELETE", f"{TENANTS}/t"),
        ("GET", "/apis/coordination.k8s.io/v1/namespaces/serving/leases/another"),
    ):
        body: Json | None = {} if verb in {"POST", "PATCH"} else None
        assert operator.call(verb, path, body).status_code == 403, (verb, path)
