"""The few calls that the operator makes. Objects go in and come out as the API server's own JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any, TypeVar, cast

from kubernetes.aio.client import ApiClient, ApisApi, CoreV1Api, CustomObjectsApi, V1DeleteOptions, V1Preconditions
from kubernetes.aio.client.exceptions import ApiException

from services.colocation.decision.model import Key
from services.colocation.names import GROUP, POOLS, TENANTS, VERSION

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
CALLS_AT_ONCE = 16
CALL_SECONDS = 10.0
MAX_ERROR = 300

T = TypeVar("T")
Json = dict[str, Any]


class Api:
    """``calls`` counts them by verb and resource."""

    WATCHED = (POOLS, TENANTS, "jobs", "nodes", "pods")

    def __init__(self, client: ApiClient) -> None:
        self.calls: Counter[str] = Counter()
        self._objects = CustomObjectsApi(client)  # serves any group, not custom ones alone
        self._core = CoreV1Api(client)
        self._groups = ApisApi(client)
        self._limit = asyncio.Semaphore(CALLS_AT_ONCE)

    async def create_job(self, manifest: Json) -> Json:
        namespace = manifest["metadata"]["namespace"]
        return await self._json(
            "create jobs",
            self._objects.create_namespaced_custom_object("batch", "v1", namespace, "jobs", manifest, **_LIMIT),
        )

    async def patch_job(self, key: Key, patch: Json) -> Json:
        return await self._json(
            "patch jobs",
            self._objects.patch_namespaced_custom_object(
                "batch", "v1", key.namespace, "jobs", key.name, patch, _content_type=MERGE, **_LIMIT
            ),
        )

    async def delete_job(self, key: Key, uid: str) -> None:
        """Its pods go with it. Deletes no other Job than that with this ``uid``; done when it is gone already."""
        body = V1DeleteOptions(propagation_policy="Background", preconditions=V1Preconditions(uid=uid))
        await self._gone(
            "delete jobs",
            self._objects.delete_namespaced_custom_object(
                "batch", "v1", key.namespace, "jobs", key.name, body=body, **_LIMIT
            ),
        )

    async def resize_pod(self, key: Key, container: str, cores: int) -> Json:
        cpu = {"cpu": str(cores)}
        body = {"spec": {"containers": [{"name": container, "resources": {"requests": cpu, "limits": cpu}}]}}
        pod = await self._call(
            "resize pods",
            self._core.patch_namespaced_pod_resize(key.name, key.namespace, body, _content_type=STRATEGIC, **_LIMIT),
        )
        made: Json = self._core.api_client.sanitize_for_serialization(pod)
        return made

    async def kill_pod(self, key: Key) -> None:
        """Without waiting for it to end by itself."""
        await self._gone(
            "delete pods",
            self._core.delete_namespaced_pod(key.name, key.namespace, grace_period_seconds=0, **_LIMIT),
        )

    async def patch_tenant(self, key: Key, patch: Json, status: bool = False) -> Json:
        patch_it = (
            self._objects.patch_namespaced_custom_object_status
            if status
            else (self._objects.patch_namespaced_custom_object)
        )
        return await self._json(
            f"patch tenants{'/status' * status}",
            patch_it(GROUP, VERSION, key.namespace, TENANTS, key.name, patch, _content_type=MERGE, **_LIMIT),
        )

    async def patch_pool(self, name: str, patch: Json, status: bool = False) -> Json:
        patch_it = (
            self._objects.patch_cluster_custom_object_status if status else (self._objects.patch_cluster_custom_object)
        )
        return await self._json(
            f"patch tenantpools{'/status' * status}",
            patch_it(GROUP, VERSION, POOLS, name, patch, _content_type=MERGE, **_LIMIT),
        )

    async def create_event(self, namespace: str, event: Json) -> None:
        await self._call(
            "create events",
            self._objects.create_namespaced_custom_object("events.k8s.io", "v1", namespace, "events", event, **_LIMIT),
        )

    async def last_warning(self, key: Key, kind: str) -> str:
        """What the newest warning among the object's events says; empty where there is none."""
        fields = {"regarding.kind": kind, "regarding.name": key.name, "type": "Warning"}
        selector = ",".join(f"{name}={value}" for name, value in fields.items())
        found = await self._json(
            "list events",
            self._objects.list_namespaced_custom_object(
                "events.k8s.io", "v1", key.namespace, "events", field_selector=selector, **_LIMIT
            ),
        )
        newest: Json = max(found["items"] or (), key=_last_seen, default={})
        return str(newest.get("note", ""))

    async def names(self, plural: str) -> tuple[set[Key], int]:
        """All that there are of a kind, out of the API server's cache, and the version at which that was so."""
        asked = {"resource_version": "0", "_headers": _NAMES_ONLY, **_LIMIT}
        if plural == "nodes":
            call = self._core.list_node_without_preload_content(**asked)
        elif plural == "pods":
            call = self._core.list_pod_for_all_namespaces_without_preload_content(**asked)
        else:
            group, version = ("batch", "v1") if plural == "jobs" else (GROUP, VERSION)
            call = self._objects.list_cluster_custom_object_without_preload_content(group, version, plural, **asked)
        answer = await self._call(f"list {plural}", call)
        text = await answer.read()
        if answer.status != HTTPStatus.OK:
            raise ApiException(status=answer.status, reason=answer.reason, body=text.decode(errors="replace"))
        found = json.loads(text)
        metadata = [each["metadata"] for each in found["items"] or ()]  # null, where there are none
        present = {Key(each.get("namespace", ""), each["name"]) for each in metadata}
        return present, int(found["metadata"]["resourceVersion"])

    async def can_resize(self) -> bool:
        """Whether the API server lets a running pod's resources be changed."""
        resources = await self._call("get resources", self._core.get_api_resources(**_LIMIT))
        return any(each.name == "pods/resize" for each in resources.resources)

    async def has_group(self, group: str) -> bool:
        """Whether the cluster serves such objects."""
        groups = await self._call("get groups", self._groups.get_api_versions(**_LIMIT))
        return any(each.name == group for each in groups.groups)

    async def _gone(self, name: str, call: Awaitable[object]) -> None:
        try:
            await self._call(name, call)
        except ApiException as error:
            if error.status not in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}:
                raise

    async def _json(self, name: str, call: Awaitable[object]) -> Json:
        """A call whose answer is an object, which the custom objects' client leaves as it came."""
        return cast(Json, await self._call(name, call))

    async def _call(self, name: str, call: Awaitable[T]) -> T:
        async with self._limit:
            self.calls[name] += 1
            return await call


def _last_seen(event: Json) -> str:
    """Times of one format sort as text; the recorder of Kubernetes' own controllers still uses the older fields."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return max(each for each in (*times, "") if each is not None)


def is_lasting(refusal: ApiException) -> bool:
    """Whether the API server will say to the same object what it says now.

    A conflict is one of versions mostly, such as that of a quota which many use at once, and passes.
    """
    if refusal.status == HTTPStatus.CONFLICT:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return bool(json.loads(refusal.body or "")["reason"] == "AlreadyExists")
        return False
    return refusal.status in {HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY}


def describe(error: Exception) -> str:
    """One line of what went wrong: the API server's own message where there is one."""
    if isinstance(error, ApiException) and error.body:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return f"{error.status}: {json.loads(error.body)['message']}"
    return " ".join(str(error).split())[:MAX_ERROR]


_LIMIT: Json = {"_request_timeout": CALL_SECONDS}
_NAMES_ONLY = {"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}
