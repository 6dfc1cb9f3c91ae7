"""A round: in which order it acts, what it reports of acts that failed, and that it does nothing twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

import pytest
from kubernetes.aio.client.exceptions import ApiException

from services.colocation.apply.api import Api
from services.colocation.apply.executor import Executor
from services.colocation.decision.model import Key
from services.colocation.metrics import OperatorMetrics
from services.colocation.names import FINALIZER
from services.colocation.observe.store import Store
from services.colocation.reconcile import Reconciler
from services.colocation.slo.watch import SloWatch
from tests.colocation.objects import Json, job, newer, node, pool, tenant, tenant_pod

UNREACHABLE = OSError("connection refused")


def refusal(status: int, message: str = "") -> ApiException:
    error = ApiException(status=status, reason="Refused")
    error.body = f'{{"message": "{message}"}}' if message else None
    return error


class Server:
    """The API server's side of a store: merges patches, counts versions, notes each call, and fails where told to."""

    def __init__(self, store: Store) -> None:
        self.calls: list[tuple[str, str]] = []  # verb with kind, and name
        self.events: list[tuple[str, str]] = []  # reason and note
        self.warning = ""
        self.failing: dict[tuple[str, str], Exception] = {}
        self._store = store
        self._version = 100

    async def create_job(self, manifest: Json) -> Json:
        name = manifest["metadata"]["name"]
        await self._note("create job", name)
        return self._newer({**manifest, "metadata": {**manifest["metadata"], "uid": f"job-{name}"}})

    async def patch_job(self, key: Key, patch: Json) -> Json:
        await self._note("patch job", key.name)
        return self._newer(merged(self._store.jobs[key], patch))

    async def delete_job(self, key: Key, uid: str) -> None:
        await self._note("delete job", key.name)

    async def resize_pod(self, key: Key, container: str, cores: int) -> Json:
        await self._note("resize pod", key.name)
        (found,) = (
            each for each in self._store.pods_of(Key(key.namespace, "a")) if each["metadata"]["name"] == key.name
        )
        return self._newer(merged(found, {"spec": {"containers": tenant_pod(cpu=str(cores))["spec"]["containers"]}}))

    async def patch_tenant(self, key: Key, patch: Json, status: bool = False) -> Json:
        await self._note("patch tenant's status" if status else "patch tenant", key.name)
        return self._newer(merged(self._store.tenants[key], patch))

    async def patch_pool(self, name: str, patch: Json, status: bool = False) -> Json:
        await self._note("patch pool's status" if status else "patch pool", name)
        return self._newer(merged(self._store.pools[name], patch))

    async def create_event(self, namespace: str, event: Json) -> None:
        self.events.append((event["reason"], event["note"]))

    async def last_warning(self, key: Key, kind: str) -> str:
        await self._note("list events", key.name)
        return self.warning

    def verbs(self, *verbs: str) -> list[tuple[str, str]]:
        return [call for call in self.calls if call[0] in verbs]

    async def _note(self, verb: str, name: str) -> None:
        self.calls.append((verb, name))
        await asyncio.sleep(0)  # others have their turn, as with a real call
        if (verb, name) in self.failing:
            raise self.failing[verb, name]

    def _newer(self, thing: Json) -> Json:
        self._version += 1
        return {**thing, "metadata": {**thing["metadata"], "resourceVersion": str(self._version)}}


def merged(thing: Any, patch: Any) -> Any:
    """A JSON merge patch."""
    if not isinstance(patch, dict):
        return patch
    into = dict(thing) if isinstance(thing, dict) else {}
    for name, value in patch.items():
        into[name] = merged(into.get(name), value)
    return {name: value for name, value in into.items() if value is not None}


class Round:
    """A store with what is given, a server behind it, and the reconciler of both."""

    def __init__(self, *things: Json) -> None:
        self.store = Store()
        for thing in (node(cpu="10"), pool(), *things):
            self._setter(thing)(thing, False)
        self.server = Server(self.store)
        self.metrics = OperatorMetrics()
        api = cast(Api, self.server)
        executor = Executor(api, self.store, "me", "")
        slo = SloWatch(1.0)
        self._reconciler = Reconciler(self.store, api, executor, slo, self.metrics, resizable=True)

    def _setter(self, thing: Json) -> Any:
        spec = thing["spec"]
        if "pool" in spec:
            return self.store.set_tenant
        if "template" in spec:
            return self.store.set_job
        if "nodeSelector" in spec:
            return self.store.set_pool
        return self.store.set_pod if "containers" in spec else self.store.set_node

    async def __call__(self) -> None:
        self.server.calls.clear()
        self.server.events.clear()
        await self._reconciler.round()

    def status(self, name: str) -> Json:
        found: Json = self.store.tenants[Key("batch", name)].get("status", {})
        return found

    def failures(self) -> Counter[str]:
        (family,) = self.metrics.failures.collect()
        return Counter({s.labels["action"]: int(s.value) for s in family.samples if s.name.endswith("_total")})


def runs(name: str, has: int = 2, **spec: Any) -> tuple[Json, Json, Json]:
    """A tenant that runs, with its Job and its pod, which can be resized."""
    own = {**tenant(name, **spec), "status": {"phase": "Running"}}
    at = tenant_pod(name, cpu=str(has))
    requests = {"resources": {"requests": {"cpu": str(has)}}}
    at["status"]["containerStatuses"] = [{"name": "main", **requests}]
    return own, job(name, suspend=False, node="n0", cores=has, active=1), at


async def test_a_cluster_at_rest_is_not_written_to() -> None:
    once = Round(*runs("a"), tenant("b", cores={"min": 20}))
    await once()
    assert once.server.calls
    await once()  # what was claimed and made is seen
    await once()
    assert (once.server.calls, once.server.events) == ([], [])


async def test_cores_are_taken_before_they_are_given() -> None:
    """8 cores: "a" gives back what it borrowed, "b" has no pool any more, and only then "c" is let in."""
    once = Round(
        *runs("a", 5, cores={"min": 2, "max": 5}),
        *runs("b", 1, pool="none"),
        tenant("c", cores={"min": 5}),
        job("c"),
    )
    await once()
    acts = once.server.verbs("patch job", "resize pod")
    assert acts[0] == ("patch job", "b")
    assert ("resize pod", "a-xyz") in acts[1:3]
    assert acts[-1] == ("patch job", "c")
    assert once.status("c")["phase"] == "Running"


async def test_nobody_is_let_in_on_cores_that_a_failed_resize_has_not_given() -> None:
    once = Round(*runs("a", 5, cores={"min": 2, "max": 5}), tenant("c", cores={"min": 5}), job("c"))
    once.server.failing["resize pod", "a-xyz"] = UNREACHABLE
    await once()
    assert not once.server.verbs("patch job")
    assert "phase" not in once.status("c")
    assert once.failures()["Resize"] == 1
    once.server.failing.clear()
    await once()
    assert once.server.verbs("patch job")[-1] == ("patch job", "c")
    assert once.status("c")["phase"] == "Running"


async def test_what_was_not_done_is_not_reported_as_done() -> None:
    once = Round(tenant("a"), job("a"), tenant("b"), job("b"))
    once.server.failing["patch job", "a"] = UNREACHABLE
    await once()
    assert "phase" not in once.status("a")
    assert once.status("b")["phase"] == "Running"
    assert [reason for reason, _ in once.server.events] == ["Released"]
    assert once.failures() == {"Release": 1}


@pytest.mark.parametrize("verb", ["create job", "patch job"])
async def test_one_whose_job_is_refused_for_good_waits_and_says_so_in_the_servers_words(verb: str) -> None:
    once = Round(tenant("a"), *([job("a")] if verb == "patch job" else []))
    once.server.failing[verb, "a"] = refusal(422, "spec.backoffLimit is -1")
    await once()
    assert once.status("a")["phase"] == "Waiting"
    assert once.status("a")["notStartedWhy"] == "its Job is refused: 422: spec.backoffLimit is -1"
    assert ("Refused", "its Job is refused: 422: spec.backoffLimit is -1") in once.server.events
    assert len(once.server.verbs(verb)) == 1
    await once()
    assert not once.server.verbs(verb)  # the same object would be refused again: others go first


async def test_one_that_was_refused_is_tried_again_after_the_others_and_its_refusal_is_not_remembered() -> None:
    once = Round(tenant("a"))
    once.server.failing["create job", "a"] = refusal(422, "spec.backoffLimit is -1")
    await once()
    once.server.failing.clear()
    long_ago = merged(once.store.tenants[Key("batch", "a")], {"status": {"notStartedAt": "2026-03-02T12:00:00Z"}})
    once.store.set_tenant(newer(long_ago), False)
    await once()
    assert once.status("a")["phase"] == "Running"


async def test_one_that_is_refused_in_passing_is_tried_again_at_once() -> None:
    once = Round(tenant("a"))
    once.server.failing["create job", "a"] = refusal(429, "too many requests")
    for _ in range(2):
        await once()
        assert once.server.verbs("create job")
        assert "notStartedWhy" not in once.status("a")


async def test_a_template_that_no_job_can_be_made_of_costs_nobody_else_anything() -> None:
    odd = tenant("odd")
    odd["spec"]["template"]["spec"]["template"]["spec"]["containers"] = "text"
    once = Round(odd, tenant("b"))
    await once()
    assert "no Job can be made of its template" in once.status("odd")["notStartedWhy"]
    assert once.status("b")["phase"] == "Running"


async def test_what_went_meanwhile_is_no_failure() -> None:
    once = Round(*runs("a", pool="none"))
    once.server.failing["patch job", "a"] = refusal(404, "jobs a not found")
    await once()
    assert once.failures() == {}
    assert once.status("a")["phase"] == "Running"  # nor is it done


async def test_how_one_ended_is_told_once_and_stays() -> None:
    ended = {**tenant("a"), "status": {"phase": "Succeeded", "message": "as it was told"}}
    once = Round(ended)
    await once()
    assert not once.server.verbs("patch tenant's status")
    assert once.status("a")["message"] == "as it was told"


@pytest.mark.parametrize(
    ("warning", "why"),
    [("exceeded quota: small", "exceeded quota: small"), ("", "its Job's events say why it has no pod")],
)
async def test_one_that_got_no_pod_makes_room_and_says_what_its_jobs_events_say(warning: str, why: str) -> None:
    own, of_it, _ = runs("a")
    of_it["status"] = {"startTime": "2026-03-02T12:00:00Z"}
    once = Round(own, of_it)
    once.server.warning = warning
    await once()
    assert once.server.verbs("patch job") == [("patch job", "a")]
    assert once.status("a")["notStartedWhy"] == f"its pod was given cores and did not start: {why}"


async def test_where_events_can_not_be_read_it_makes_room_all_the_same() -> None:
    own, of_it, _ = runs("a")
    of_it["status"] = {"startTime": "2026-03-02T12:00:00Z"}
    once = Round(own, of_it)
    once.server.failing["list events", "a"] = refusal(403, "forbidden")
    await once()
    assert "its Job's events say" in once.status("a")["notStartedWhy"]


async def test_each_object_gets_the_operators_finalizer_once_and_keeps_those_of_others() -> None:
    of_another = tenant("b")
    of_another["metadata"]["finalizers"] = ["example.com/other"]
    once = Round(tenant("a"), of_another)
    await once()
    await once()
    assert not once.server.verbs("patch tenant", "patch pool")
    claimed = {key.name: each["metadata"]["finalizers"] for key, each in once.store.tenants.items()}
    assert claimed == {"a": [FINALIZER], "b": ["example.com/other", FINALIZER]}
    assert once.store.pools["p"]["metadata"]["finalizers"] == [FINALIZER]


def deleted(thing: Json, *finalizers: str) -> Json:
    metadata = {**thing["metadata"], "deletionTimestamp": "2026-03-02T13:00:00Z", "finalizers": [*finalizers]}
    return {**thing, "metadata": metadata}


async def test_a_deleted_tenant_is_let_go_once_its_pod_has_ended_and_not_before() -> None:
    own, of_it, at = runs("a")
    once = Round(deleted(own, FINALIZER), of_it, at)
    await once()
    assert once.server.verbs("delete job") == [("delete job", "a")]
    assert Key("batch", "a") in once.store.tenants
    once.store.set_pod(at, True)
    await once()
    assert Key("batch", "a") not in once.store.tenants


async def test_a_deleted_tenant_that_another_holds_stays_and_is_not_claimed_again() -> None:
    once = Round(deleted(tenant("a"), "example.com/other", FINALIZER))
    await once()
    await once()
    assert not once.server.calls
    assert once.store.tenants[Key("batch", "a")]["metadata"]["finalizers"] == ["example.com/other"]


async def test_a_deleted_pool_stays_while_a_tenant_of_its_runs() -> None:
    own, of_it, at = runs("a")
    once = Round(own, of_it, at)
    once.store.set_pool(newer(deleted(pool(), FINALIZER)), False)
    await once()  # suspends it
    assert once.server.verbs("patch job") == [("patch job", "a")]
    assert "p" in once.store.pools
    once.store.set_pod(at, True)
    await once()
    assert "p" not in once.store.pools
