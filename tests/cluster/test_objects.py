"""The API server refuses TenantPools and Tenants that make no sense, and people what is not theirs.

Wrong values of single fields are test_fields.py's.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.cluster.control_plane import Client, ControlPlane, Json
from tests.cluster.scene import POOLS, TENANTS, Scene, dry, pool_manifest, tenant_manifest

GUARD = {"metricsURLs": ["http://gateway:8000/metrics"], "ttftP99Milliseconds": 200}
NIGHT = {"start": "22:00", "end": "06:00"}

BAD_POOLS: list[tuple[str, Json]] = [
    ("nodeSelector", {"nodeSelector": {"pool": 1}}),
    ("reservedCores", {"serving": {"baselineCores": 0, "reservedCores": 1.5}}),
    ("ttftP99Milliseconds", {"sloGuard": {"metricsURLs": ["http://x/metrics"]}}),
    ("metricsURLs", {"sloGuard": {**GUARD, "metricsURLs": ["file:///etc/passwd"]}}),
    ("metricsURLs", {"sloGuard": {**GUARD, "metricsURLs": ["http://x/m", "http://x/m"]}}),
    ("restoreAfterSeconds", {"sloGuard": {**GUARD, "windowSeconds": 60, "restoreAfterSeconds": 59}}),
    ("start", {"schedule": {"windows": [{**NIGHT, "start": "24:00"}]}}),
    ("end", {"schedule": {"windows": [{**NIGHT, "end": "6:00"}]}}),
    ("must differ", {"schedule": {"windows": [{"start": "06:00", "end": "06:00"}]}}),
    ("timeZone", {"schedule": {"timeZone": "../etc/passwd", "windows": [NIGHT]}}),
]


def template(**pod: Any) -> Json:
    return {"spec": {"template": {"spec": {"containers": [{"name": "a", "image": "x"}], **pod}}}}


def job_template(**job: Any) -> Json:
    return {"spec": {**template()["spec"], **job}}


BAD_TENANTS: list[tuple[str, Json]] = [
    ("min", {"cores": {"min": "500m"}}),
    ("max must be at least min", {"cores": {"min": 4, "max": 3}}),
    ("containers", {"template": template(containers=[{"name": "a", "image": "x"}, {"name": "b", "image": "x"}])}),
    ("nodeName", {"template": template(nodeName="n0")}),
    ("priorityClassName", {"template": template(priorityClassName="system-node-critical")}),
    ("operator sizes its container", {"template": template(resources={"requests": {"cpu": "8"}})}),
    ("sidecars", {"template": template(initContainers=[{"name": "b", "image": "x", "restartPolicy": "Always"}])}),
    ("restartPolicy", {"template": template(restartPolicy="Always")}),
    ("operator sets it", {"template": job_template(suspend=False)}),
    ("would run again", {"template": job_template(ttlSecondsAfterFinished=0)}),
    ("own controller runs it", {"template": job_template(managedBy="example.com/another")}),
    ("those that it makes", {"template": job_template(manualSelector=True)}),
    ("follows from the class", {"template": template(priority=0)}),
    ("operator's to say", {"template": template(preemptionPolicy="Never")}),
]


def container(**more: Any) -> Json:
    return template(containers=[{"name": "a", "image": "x", **more}])


POD = "spec.template.spec.template.spec"
GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
CONFLICTING: list[tuple[str, tuple[str, ...], Json]] = [
    ("GPU", (f"{POD}.containers[0].resources.limits", "cpu, memory and ephemeral-storage alone"), container(**GPU)),
    (
        "two devices of serving's",
        (f"{POD}.containers[0].resources.requests", "devices and huge pages are serving's"),
        container(resources={"requests": {"rdma/hca": "1", "cpu": "2", "nvidia.com/bf_sf": 1}}),
    ),
    (
        "huge pages",
        (f"{POD}.containers[0].resources.limits", "devices and huge pages"),
        container(resources={"limits": {"hugepages-2Mi": "64Mi", "memory": "64Mi"}}),
    ),
    (
        "GPU of an init container",
        (f"{POD}.initContainers[0].resources.limits", "devices and huge pages"),
        template(initContainers=[{"name": "b", "image": "x", **GPU}]),
    ),
    (
        "GPU by a resource claim",
        (f"{POD}.resourceClaims", "devices are serving's"),
        template(resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "gpu"}]),
    ),
    *(
        (field, (f"{POD}.{field}", "true: must be false"), template(**{field: True}))
        for field in ("hostNetwork", "hostPID", "hostIPC")
    ),
    (
        "privileged",
        (f"{POD}.containers[0].securityContext.privileged", "true: must be false"),
        container(securityContext={"privileged": True}),
    ),
    (
        "a port of the node",
        (f"{POD}.containers[0].ports[0].hostPort", "8000: the node's ports are serving's"),
        container(ports=[{"containerPort": 80, "hostPort": 8000}]),
    ),
    (
        "a path of the node",
        (f"{POD}.volumes[1].hostPath", "volume ring is a path of the node"),
        template(volumes=[{"name": "ok", "emptyDir": {}}, {"name": "ring", "hostPath": {"path": "/dev/shm"}}]),
    ),
    (
        "required anti-affinity",
        (f"{POD}.affinity.podAntiAffinity.requiredDuringScheduling", "keep pods of serving off the node"),
        template(
            affinity={
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "topologyKey": "kubernetes.io/hostname",
                            "labelSelector": {"matchLabels": {"app.kubernetes.io/part-of": "blink"}},
                            "namespaceSelector": {},
                        }
                    ]
                }
            }
        ),
    ),
]


@pytest.mark.parametrize(
    ("path", "thing"),
    [(POOLS, pool_manifest()), (TENANTS, tenant_manifest("t")), (TENANTS, tenant_manifest("t", 3, 3))],
    ids=["pool", "tenant", "a range of one"],
)
def test_the_least_that_makes_sense_is_taken(client: Client, path: str, thing: Json) -> None:
    client.create(dry(path), thing)


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


@pytest.mark.parametrize(("named", "of"), [each[1:] for each in CONFLICTING], ids=[each[0] for each in CONFLICTING])
def test_a_tenant_that_would_take_what_is_servings_is_refused_by_field_value_and_rule(
    client: Client, named: tuple[str, ...], of: Json
) -> None:
    answer = client.call("POST", dry(TENANTS), tenant_manifest("t", template=copy.deepcopy(of)))
    assert answer.status_code == 422, answer.text
    for each in named:
        assert each in answer.json()["message"]


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


def test_who_may_make_tenants_sees_their_events_as_kubectl_asks_for_them(plane: ControlPlane) -> None:
    ada, eve = plane.client("ada"), plane.client("eve")
    for of in ("/api/v1", "/apis/events.k8s.io/v1"):  # kubectl describe, and kubectl get events, ask the former
        assert ada.call("GET", f"{of}/namespaces/batch/events").ok
        assert ada.call("GET", f"{of}/namespaces/default/events").status_code == 403
        assert ada.call("POST", f"{of}/namespaces/batch/events", {}).status_code == 403
        assert eve.call("GET", f"{of}/namespaces/batch/events").status_code == 403


def test_who_may_make_tenants_sees_why_they_wait(plane: ControlPlane, scene: Scene) -> None:
    scene.pool()
    scene.tenant("mine")

    def told(user: str, *of: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "services.cli", "tenants", *of]
        environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig(user)), "COLUMNS": "200"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    ada = told("ada", "--namespace", "batch")
    assert ada.returncode == 0, ada.stderr
    assert "batch/mine" in ada.stdout
    everywhere = told("ada")
    assert everywhere.returncode != 0
    assert 'User "ada" cannot list resource "tenants"' in everywhere.stderr
    assert "name it, --namespace NAME" in everywhere.stderr
    eve = told("eve", "--namespace", "batch")
    assert eve.returncode != 0
    assert "403" in eve.stderr
    assert "name it" not in eve.stderr


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
