"""``python -m services.colocation.uninstall [SECONDS]``: deletes every Tenant, then every TenantPool.

The chart runs it before it removes the operator, which takes away their finalizers. Where it does not within SECONDS
(60), as it can't be started or has no replicas, this does: a Tenant's Job goes with it all the same, by its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from http import HTTPStatus
from typing import cast

from kubernetes.aio.client import ApiClient, CustomObjectsApi
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import load_config

from services.colocation.apply.api import MERGE, Json
from services.colocation.errors import ColocationError
from services.colocation.names import FINALIZER, GROUP, POOLS, TENANTS, VERSION

PATIENCE_SECONDS = 60.0
WAIT_SECONDS = 30.0
LOOK_SECONDS = 1.0


async def uninstall(api: CustomObjectsApi, patience: float = PATIENCE_SECONDS, wait: float = WAIT_SECONDS) -> None:
    """Raises ColocationError when something is left ``wait`` seconds after the operator's ``patience``."""
    for plural in (TENANTS, POOLS):
        for thing in await _all(api, plural):
            await _delete(api, plural, thing)
        if await _gone(api, plural, patience):
            continue
        for thing in await _all(api, plural):
            await _let_go(api, plural, thing)
        if not await _gone(api, plural, wait):
            left = await _all(api, plural)
            held = sorted({each for thing in left for each in thing["metadata"].get("finalizers") or ()})
            raise ColocationError(f"{len(left)} {plural}.{GROUP} are left, with finalizers {', '.join(held) or 'none'}")


async def _delete(api: CustomObjectsApi, plural: str, thing: Json) -> None:
    name, namespace = thing["metadata"]["name"], thing["metadata"].get("namespace")
    with _while_it_is_there():
        if namespace:
            await api.delete_namespaced_custom_object(GROUP, VERSION, namespace, plural, name)
        else:
            await api.delete_cluster_custom_object(GROUP, VERSION, plural, name)


async def _let_go(api: CustomObjectsApi, plural: str, thing: Json) -> None:
    """Without the operator's finalizer; others keep theirs."""
    metadata = thing["metadata"]
    name, namespace = metadata["name"], metadata.get("namespace")
    others = [each for each in metadata.get("finalizers") or () if each != FINALIZER]
    patch = {"metadata": {"finalizers": others}}
    with _while_it_is_there():
        if namespace:
            await api.patch_namespaced_custom_object(
                GROUP, VERSION, namespace, plural, name, patch, _content_type=MERGE
            )
        else:
            await api.patch_cluster_custom_object(GROUP, VERSION, plural, name, patch, _content_type=MERGE)


@contextlib.contextmanager
def _while_it_is_there() -> Iterator[None]:
    try:
        yield
    except ApiException as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise


async def _gone(api: CustomObjectsApi, plural: str, within: float) -> bool:
    """Whether there are none any more, after ``within`` seconds at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within):
            while await _all(api, plural):  # noqa: ASYNC110 (they are in another process)
                await asyncio.sleep(LOOK_SECONDS)
            return True
    return False


async def _all(api: CustomObjectsApi, plural: str) -> list[Json]:
    found = cast(Json, await api.list_cluster_custom_object(GROUP, VERSION, plural))
    return cast(list[Json], found["items"])


async def _main() -> None:
    await load_config()  # type: ignore[no-untyped-call]
    async with ApiClient() as client:
        await uninstall(
            CustomObjectsApi(client), patience=float(sys.argv[1]) if len(sys.argv) > 1 else PATIENCE_SECONDS
        )


if __name__ == "__main__":
    try:
        asyncio.run(_main())
    except ColocationError as failure:
        sys.exit(f"blink: {failure}")
