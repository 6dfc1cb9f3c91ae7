"""At most one replica acts: the holder of a Lease.

As in client-go, a lease is stale when its record has not changed for its duration by this replica's own clock, so
clocks that differ do no harm, and a holder gives up before others may take over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, cast

from kubernetes.aio.client import ApiClient, CustomObjectsApi
from kubernetes.aio.client.exceptions import ApiException

from services.colocation.apply.api import describe
from services.colocation.apply.executor import CALL_ERRORS
from services.colocation.observe.objects import timestamp
from services.colocation.settings import OperatorSettings
from services.common.logging import get_logger

GIVE_UP = 2 / 3  # of the lease's duration: a holder that could not renew for this long stops
RETRY = 1 / 6  # of it: between two tries
_KIND = ("coordination.k8s.io", "v1")

Json = dict[str, Any]


class Election:
    """One replica's view of the lease."""

    def __init__(self, client: ApiClient, settings: OperatorSettings) -> None:
        self._api = CustomObjectsApi(client)
        self._namespace, self._name = settings.namespace, settings.lease
        self._identity = settings.replica
        self._seconds = settings.lease_seconds
        self._seen: Json | None = None
        self._seen_at = 0.0

    async def lead(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``act`` while this replica holds the lease, cancel it when it does not. Raises what ``act`` does."""
        while True:
            while not await self._take():  # noqa: ASYNC110 (another process releases it)
                await asyncio.sleep(self._seconds * RETRY)
            acting = asyncio.create_task(act())
            try:
                await self._hold(acting)
            finally:
                acting.cancel()
                await asyncio.wait([acting])  # to await the task itself would mix its cancellation up with ours
            if not acting.cancelled():
                acting.result()
            get_logger().warning("lease_lost", lease=f"{self._namespace}/{self._name}")

    async def _hold(self, acting: asyncio.Task[None]) -> None:
        """Renew until that has failed for too long, or until ``acting`` ends."""
        renewed = time.monotonic()
        while not acting.done() and time.monotonic() - renewed < self._seconds * GIVE_UP:
            await asyncio.wait([acting], timeout=self._seconds * RETRY)
            started = time.monotonic()
            if await self._take():
                renewed = started

    async def _take(self) -> bool:
        """Take or renew the lease if it is free, stale or this replica's."""
        try:
            async with asyncio.timeout(self._seconds * GIVE_UP / 2):
                return await self._try_to_take()
        except CALL_ERRORS as error:
            get_logger().warning("lease_unreachable", error=describe(error))
            return False

    async def _try_to_take(self) -> bool:
        lease = await self._read()
        now = timestamp(datetime.now(UTC), "microseconds")
        mine = {"holderIdentity": self._identity, "leaseDurationSeconds": self._seconds, "renewTime": now}
        if lease is None:
            new = {
                "apiVersion": "/".join(_KIND),
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": {**mine, "acquireTime": now, "leaseTransitions": 0},
            }
            await self._api.create_namespaced_custom_object(*_KIND, self._namespace, "leases", new)
            return True
        spec = lease.get("spec") or {}
        if spec != self._seen:
            self._seen, self._seen_at = spec, time.monotonic()
        holder = spec.get("holderIdentity")
        if holder != self._identity:
            stale = time.monotonic() - self._seen_at >= spec.get("leaseDurationSeconds", self._seconds)
            if holder and not stale:
                return False
            mine |= {"acquireTime": now, "leaseTransitions": spec.get("leaseTransitions", 0) + 1}
        lease["spec"] = {**spec, **mine}
        # It carries the version that was read: of two who try at once, one is refused.
        await self._api.replace_namespaced_custom_object(*_KIND, self._namespace, "leases", self._name, lease)
        return True

    async def _read(self) -> Json | None:
        try:
            found = await self._api.get_namespaced_custom_object(*_KIND, self._namespace, "leases", self._name)
        except ApiException as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise
        return cast(Json, found)
