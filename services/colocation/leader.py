"""At most one replica acts: the holder of a Lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kubernetes.aio.client import ApiClient
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from services.colocation.settings import OperatorSettings
from services.common.logging import get_logger


async def lead(client: ApiClient, settings: OperatorSettings, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``act`` whenever this replica holds the lease, and cancel it as soon as it can't renew it. Never returns."""
    log = get_logger()
    while True:
        lock = LeaseLock(settings.lease, settings.namespace, settings.replica, client)
        lasting = settings.lease_seconds
        config = Config(
            lock,
            lease_duration=lasting,
            renew_deadline=lasting * 2 / 3,
            retry_period=lasting / 6,
            onstarted_leading=act,
            onstopped_leading=_nothing,
        )
        try:
            await LeaderElection(config).run()
        except (OSError, TimeoutError) as error:
            log.warning("lease_unreachable", error=str(error))
        log.warning("lease_lost", lease=f"{settings.namespace}/{settings.lease}")
        await asyncio.sleep(config.retry_period)


async def _nothing() -> None:
    """Cancelling ``act`` is all there is to do."""
