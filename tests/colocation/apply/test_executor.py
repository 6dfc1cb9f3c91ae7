"""What a release and a resize ask of the API server."""

from __future__ import annotations

from typing import Any, cast

import pytest

from services.colocation.apply.api import Api
from services.colocation.apply.executor import Executor
from services.colocation.apply.jobs import bound
from services.colocation.decision.actions import Reason, Release, Resize
from services.colocation.decision.model import Key
from services.colocation.names import RDT_ANNOTATION
from services.colocation.observe.store import Store
from tests.colocation.objects import Json, job, pool, tenant, tenant_pod

KEY = Key("batch", "a")


class Recorder:
    """The API's side: what was asked for, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    async def patch_job(self, key: Key, patch: Json) -> Json:
        self.asked.append(("patch", patch))
        return newest(job(suspend=False, node="n0"))

    async def create_job(self, manifest: Json) -> Json:
        self.asked.append(("create", manifest))
        return newest(manifest | {"metadata": {**manifest["metadata"], "uid": "new"}})

    async def delete_job(self, key: Key, uid: str) -> None:
        self.asked.append(("delete", uid))

    async def resize_pod(self, key: Key, container: str, cores: int) -> Json:
        self.asked.append(("resize", key.name))
        return newest(tenant_pod(name=key.name, cpu=str(cores)))

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.asked]


def newest(thing: Json) -> Json:
    return {**thing, "metadata": {**thing["metadata"], "resourceVersion": "99"}}


def suspended(ran: bool, node: str = "n0") -> Json:
    thing = job(node=node)
    if ran:
        thing["status"]["startTime"] = "2026-03-02T12:00:00Z"
    thing["spec"]["template"]["spec"]["affinity"] = bound(None, node)
    return thing


def executor(recorder: Recorder, of_job: Json, *pods: Json, **ceilings: str) -> Executor:
    store = Store()
    store.set_tenant(tenant(), gone=False)
    store.set_pool(pool(ceilings=ceilings), gone=False)
    store.set_job(of_job, gone=False)
    for each in pods:
        store.set_pod(each, gone=False)
    return Executor(cast(Api, recorder), store, "me", "")


async def test_a_job_that_comes_back_where_it_was_goes_on_and_keeps_what_it_has_counted() -> None:
    asked = Recorder()
    await executor(asked, suspended(ran=True)).carry_out(Release(KEY, Reason.RELEASED, "", "n0", 2))
    ((verb, patch),) = asked.asked
    assert (verb, patch["spec"]) == ("patch", {"suspend": False})


@pytest.mark.parametrize(("node", "cores"), [("n1", 2), ("n0", 3)], ids=["another node", "another size"])
async def test_a_job_that_has_run_is_made_anew_for(node: str, cores: int) -> None:
    asked = Recorder()
    await executor(asked, suspended(ran=True)).carry_out(Release(KEY, Reason.RELEASED, "", node, cores))
    assert asked.verbs() == ["delete", "create", "patch"]


async def test_a_job_that_never_ran_is_only_told_its_node() -> None:
    asked = Recorder()
    await executor(asked, suspended(ran=False)).carry_out(Release(KEY, Reason.RELEASED, "", "n1", 2))
    ((verb, patch),) = asked.asked
    assert verb == "patch"
    assert patch["spec"]["template"]["spec"]["affinity"] == bound(None, "n1")


async def test_a_job_made_before_its_pool_named_a_class_of_bandwidth_is_made_anew_with_it() -> None:
    asked = Recorder()
    await executor(asked, suspended(ran=False), rdtClass="tenants").carry_out(
        Release(KEY, Reason.RELEASED, "", "n0", 2)
    )
    assert asked.verbs() == ["delete", "create", "patch"]
    assert asked.asked[1][1]["spec"]["template"]["metadata"]["annotations"] == {RDT_ANNOTATION: "tenants"}


async def test_a_job_of_a_class_that_its_pool_names_no_more_is_made_anew_without_it() -> None:
    asked, classed = Recorder(), suspended(ran=False)
    classed["spec"]["template"]["metadata"] = {"annotations": {RDT_ANNOTATION: "tenants"}}
    await executor(asked, classed).carry_out(Release(KEY, Reason.RELEASED, "", "n0", 2))
    assert asked.verbs() == ["delete", "create", "patch"]
    assert asked.asked[1][1]["spec"]["template"]["metadata"]["annotations"] == {}


async def test_only_the_jobs_own_pods_are_resized() -> None:
    asked = Recorder()
    foreign = tenant_pod(name="foreign", ownerReferences=[])
    acting = executor(asked, job(suspend=False, node="n0"), tenant_pod(), foreign)
    await acting.carry_out(Resize(KEY, Reason.GROWN, "", 3))
    assert [what for verb, what in asked.asked if verb == "resize"] == ["a-xyz"]
