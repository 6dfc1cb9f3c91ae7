"""``python -m services.colocation.uninstall``: deletes every Tenant, then every TenantPool, and waits for their end.

The chart runs it before it removes the operator, which alone takes away their finalizers.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

from kubernetes.aio.client import ApiClient, CustomObjectsApi
from kubernetes.aio.config import load_config

from services.colocation.errors import ColocationError
from services.colocation.names import GROUP, POOLS, TENANTS, VERSION

WAIT_SECONDS = 180.0
LOOK_SECONDS = 1.0


async def uninstall(api: CustomObjectsApi, wait: float = WAIT_SECONDS) -> None:
    """Raises ColocationError when something is left after ``wait`` seconds."""
    for plural in (TENANTS, POOLS):
        for thing in await _all(api, plural):
            name, namespace = thing["metadata"]["name"], thing["metadata"].get("namespace")
            if namespace:
                await api.delete_namespaced_custom_object(GROUP, VERSION, namespace, plural, name)
            else:
                await api.delete_cluster_custom_object(GROUP, VERSION, plural, name)
        try:
            async with asyncio.timeout(wait):
                while await _all(api, plural):  # noqa: ASYNC110 (they are in another process)
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError as error:
            left = len(await _all(api, plural))
            raise ColocationError(
                f"{left} {plural}.{GROUP} are left after {wait:g} s: the operator's log says what holds them"
            ) from error


async def _all(api: CustomObjectsApi, plural: str) -> list[dict[str, Any]]:
    found = cast(dict[str, Any], await api.list_cluster_custom_object(GROUP, VERSION, plural))
    return cast(list[dict[str, Any]], found["items"])


async def _main() -> None:
    await load_config()  # type: ignore[no-untyped-call]
    async with ApiClient() as client:
        await uninstall(CustomObjectsApi(client))


if __name__ == "__main__":
    try:
        asyncio.run(_main())
    except ColocationError as failure:
        sys.exit(f"blink: {failure}")
