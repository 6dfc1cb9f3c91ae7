"""The Job that is made of a Tenant."""

from __future__ import annotations

import copy

from services.colocation.apply.jobs import bound, job_cores, job_manifest
from services.colocation.names import RDT_PREFIX
from tests.colocation.objects import tenant

HERE = {"key": "metadata.name", "operator": "In", "values": ["n0"]}


def test_it_is_suspended_owned_and_labelled_and_leaves_the_tenant_untouched() -> None:
    thing = tenant()
    before = copy.deepcopy(thing)
    made = job_manifest(thing, 2, "", "")
    assert thing == before
    assert made["spec"]["suspend"] is True
    assert made["metadata"]["ownerReferences"][0]["uid"] == "uid-a"
    assert made["metadata"]["labels"] == made["spec"]["template"]["metadata"]["labels"] == {"blink.dev/tenant": "a"}
    assert "affinity" not in made["spec"]["template"]["spec"]


def test_its_container_is_guaranteed_whole_cores() -> None:
    memory = {"resources": {"limits": {"memory": "1Gi"}}}
    thing = tenant(pod={"containers": [{"name": "main", "image": "x", **memory}]})
    container = job_manifest(thing, 4, "n0", "")["spec"]["template"]["spec"]["containers"][0]
    both = {"cpu": "4", "memory": "1Gi"}
    assert container["resources"] == {"requests": both, "limits": both}
    assert job_cores(job_manifest(thing, 4, "n0", "")) == 4


def test_being_drained_is_no_failure_of_a_pod_that_is_not_restarted_in_place() -> None:
    rules = job_manifest(tenant(), 2, "", "")["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert "podFailurePolicy" not in job_manifest(tenant(pod={"restartPolicy": "OnFailure"}), 2, "", "")["spec"]


def test_a_priority_class_is_the_operators_to_give() -> None:
    assert job_manifest(tenant(), 2, "", "low")["spec"]["template"]["spec"]["priorityClassName"] == "low"
    own = tenant(pod={"priorityClassName": "own"})
    assert job_manifest(own, 2, "", "low")["spec"]["template"]["spec"]["priorityClassName"] == "low"


def test_containers_that_run_before_it_never_make_the_pod_larger() -> None:
    earlier = {"name": "before", "image": "x", "resources": {"requests": {"cpu": "64", "memory": "1Gi"}}}
    made = job_manifest(tenant(pod={"initContainers": [earlier]}), 4, "n0", "")["spec"]["template"]["spec"]
    both = {"cpu": "2", "memory": "1Gi"}
    assert made["initContainers"][0]["resources"] == {"requests": both, "limits": both}


def test_a_class_of_memory_bandwidth_is_the_pools_to_give() -> None:
    thing = tenant()
    pod = thing["spec"]["template"]["spec"]["template"]
    pod["metadata"] = {"annotations": {f"{RDT_PREFIX}container.main": "mine", "own": "yes"}}
    told = job_manifest(thing, 2, "", "", rdt_class="tenants")["spec"]["template"]["metadata"]["annotations"]
    assert told == {f"{RDT_PREFIX}pod": "tenants", "own": "yes"}
    assert job_manifest(thing, 2, "", "")["spec"]["template"]["metadata"]["annotations"] == {"own": "yes"}


def test_the_node_is_one_more_requirement_of_every_alternative_that_the_tenant_names() -> None:
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"]
    own = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": zones}}}
    terms = bound(own, "n0")["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [{**zone, "matchFields": [HERE]} for zone in zones]
    alone = bound(None, "n0")["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert alone == [{"matchFields": [HERE]}]
