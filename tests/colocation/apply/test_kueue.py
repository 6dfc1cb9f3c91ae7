"""A Tenant whose template names a queue of Kueue's: the operator gives it a node, Kueue says when it runs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import pytest

from services.colocation.apply.api import Api
from services.colocation.apply.executor import Executor
from services.colocation.apply.jobs import job_manifest, queue_of
from services.colocation.decision.actions import Phase, Reason, Release, Suspend
from services.colocation.decision.decide import decide
from services.colocation.decision.model import Key, Placement
from services.colocation.names import QUEUE_LABEL
from services.colocation.observe.objects import placement_of, tenant_of
from services.colocation.observe.store import Store
from tests.colocation.objects import job, node, pool, tenant

KEY = Key("batch", "a")
RELEASE = Release(KEY, Reason.RELEASED, "", "n0", 2)
NOW = datetime(2026, 3, 2, 13, tzinfo=UTC)


def queueing_tenant() -> dict[str, Any]:
    thing = tenant()
    thing["spec"]["template"]["metadata"] = {"labels": {QUEUE_LABEL: "team", "own": "yes"}}
    return thing


def queued_job(suspend: bool = True) -> dict[str, Any]:
    thing = job(suspend=suspend, node="n0")
    thing["metadata"]["labels"][QUEUE_LABEL] = "team"
    return thing


class Recorder:
    """The API's side: what was asked for."""

    def __init__(self) -> None:
        self.patches: list[dict[str, Any]] = []
        self.created: list[dict[str, Any]] = []
        self.deleted: list[str] = []

    async def patch_job(self, key: Key, patch: dict[str, Any]) -> dict[str, Any]:
        self.patches.append(patch)
        return queued_job()

    async def create_job(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.created.append(manifest)
        return manifest | {"metadata": {**manifest["metadata"], "uid": "new", "resourceVersion": "9"}}

    async def delete_job(self, key: Key, uid: str) -> None:
        self.deleted.append(uid)


def executor(recorder: Recorder, known: dict[str, Any] | None, kueue: bool = True) -> Executor:
    store = Store()
    store.set_tenant(queueing_tenant(), gone=False)
    if known is not None:
        store.set_job(known, gone=False)
    return Executor(cast(Api, recorder), store, "me", "", kueue=kueue)


def test_the_queue_is_kept_from_a_job_until_it_has_a_node() -> None:
    thing = queueing_tenant()
    assert queue_of(thing) == "team"
    assert QUEUE_LABEL not in job_manifest(thing, 2, "", "")["metadata"]["labels"]
    placed = job_manifest(thing, 2, "n0", "", queue="team")
    assert placed["metadata"]["labels"] == {QUEUE_LABEL: "team", "own": "yes", "blink.dev/tenant": "a"}
    assert placed["spec"]["suspend"] is True


async def test_a_release_gives_the_job_its_node_and_queue_and_leaves_suspending_to_kueue() -> None:
    asked = Recorder()
    await executor(asked, job()).carry_out(RELEASE)
    (patch,) = asked.patches
    assert patch["metadata"]["labels"] == {QUEUE_LABEL: "team"}
    assert "suspend" not in patch["spec"]
    assert patch["spec"]["template"]["spec"]["affinity"]


async def test_without_kueue_the_label_means_nothing_and_the_operator_starts_the_job() -> None:
    asked = Recorder()
    await executor(asked, job(), kueue=False).carry_out(RELEASE)
    (patch,) = asked.patches
    assert "labels" not in patch["metadata"]
    assert patch["spec"]["suspend"] is False


async def test_a_queued_job_is_not_suspended_but_removed_as_kueue_would_start_it_again() -> None:
    asked = Recorder()
    await executor(asked, queued_job(suspend=False)).carry_out(Suspend(KEY, Reason.SUSPENDED_FOR_SLO, ""))
    assert (asked.deleted, asked.patches) == (["job-a"], [])


@pytest.mark.parametrize("suspended", [True, False])
def test_a_queued_job_holds_its_cores_whether_kueue_has_admitted_it_or_not(suspended: bool) -> None:
    assert placement_of(queued_job(suspended), []) == Placement("n0", 2)
    assert tenant_of(queueing_tenant(), queued_job(suspended), []).held_by_kueue is suspended


def test_that_kueue_lets_it_wait_is_what_its_status_says_and_nothing_is_done_about_it() -> None:
    store = Store()
    store.set_node(node(), gone=False)
    store.set_pool(pool(), gone=False)
    store.set_tenant(queueing_tenant(), gone=False)
    store.set_job(queued_job(), gone=False)
    plan = decide(store.cluster(NOW, {}, resizable=True))
    report = plan.tenants[KEY]
    assert plan.actions == ()
    assert (report.phase, report.reason, report.node, report.cores) == (Phase.WAITING, Reason.KUEUE_HOLDS, "n0", 2)
    assert "2 cores of n0 are kept for it" in report.message
