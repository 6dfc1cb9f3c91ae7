"""The operator's rights are exactly the calls that it makes: each of its client's is made, to one who notes it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from services.colocation.apply.api import Api
from services.colocation.decision.model import Key
from tests.deploy.chart.rendering import Json, rendered

Right = tuple[str, str, str]  # group, resource, verb
KEY = Key("batch", "a")
VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete", "PUT": "update"}
# By the name of Api's method, so that none is left out.
CALLS: dict[str, list[Callable[[Api], Awaitable[object]]]] = {
    "create_job": [lambda api: api.create_job({"metadata": {"namespace": "batch"}})],
    "patch_job": [lambda api: api.patch_job(KEY, {})],
    "delete_job": [lambda api: api.delete_job(KEY, "uid")],
    "resize_pod": [lambda api: api.resize_pod(KEY, "main", 2)],
    "kill_pod": [lambda api: api.kill_pod(KEY)],
    "patch_tenant": [lambda api: api.patch_tenant(KEY, {}), lambda api: api.patch_tenant(KEY, {}, status=True)],
    "patch_pool": [lambda api: api.patch_pool("p", {}), lambda api: api.patch_pool("p", {}, status=True)],
    "create_event": [lambda api: api.create_event("batch", {})],
    "last_warning": [lambda api: api.last_warning(KEY, "Job")],
    "names": [lambda api, plural=plural: api.names(plural) for plural in Api.WATCHED],  # type: ignore[misc]
    # Whoever is authenticated may ask what there is.
    "can_resize": [lambda api: api.can_resize()],
    "has_group": [lambda api: api.has_group("example.com")],
}
GROUPS = {"nodes": "", "pods": "", "jobs": "batch", "tenantpools": "blink.dev", "tenants": "blink.dev"}
# Needs no call: whose object is named as an owner that blocks deletion, must be one that the caller could change so.
OWNING = ("blink.dev", "tenants/finalizers", "update")


def right_of(request: web.Request) -> Right | None:
    """What the API server's authorizer would look for; None for what every account may ask."""
    parts = request.path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else ("".join(parts[1:2]), parts[3:])
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    if not rest:
        return None
    resource, *name = rest
    verb = VERBS.get(request.method) or ("watch" if "watch" in request.query else "get" if name else "list")
    return group, "/".join((resource, *name[1:])), verb


@pytest.fixture
async def noted() -> AsyncIterator[tuple[Api, set[Right]]]:
    """The operator's client, and the rights that what is called with it takes."""
    seen: set[Right] = set()

    async def answer(request: web.Request) -> web.Response:
        if (right := right_of(request)) is not None:
            seen.add(right)
        body: Json = {"items": [], "metadata": {"resourceVersion": "1"}, "groups": [], "groupVersion": "v1"}
        return web.json_response({**body, "resources": []})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, ApiClient(Configuration(host=str(server.make_url("")))) as client:
        yield Api(client), seen


def granted() -> set[Right]:
    (role,) = (
        each
        for each in rendered("cpu-demo")
        if each["kind"] == "ClusterRole" and each["metadata"]["name"] == "blink-operator"
    )
    assert not [rule for rule in role["rules"] if {"resourceNames", "nonResourceURLs"} & set(rule)]
    return {
        (g, r, v) for rule in role["rules"] for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]
    }


async def test_the_operator_may_do_what_it_does_and_nothing_else(noted: tuple[Api, set[Right]]) -> None:
    api, made = noted
    assert set(CALLS) == {name for name in vars(Api) if not name.startswith("_") and callable(getattr(Api, name))}
    for calls in CALLS.values():
        for call in calls:
            await call(api)
    watched = {(GROUPS[plural], plural, verb) for plural in Api.WATCHED for verb in ("list", "watch")}  # kopf's
    assert granted() == made | watched | {OWNING}
