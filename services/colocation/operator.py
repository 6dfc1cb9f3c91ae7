"""The operator's process: kopf watches the cluster, and whoever holds the lease decides and acts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import kopf
from kubernetes.aio.client import ApiClient
from kubernetes.aio.config import load_config
from prometheus_client import start_http_server

from services.colocation.apply.api import Api, describe
from services.colocation.apply.executor import CALL_ERRORS, Executor
from services.colocation.leader import Election
from services.colocation.metrics import OperatorMetrics
from services.colocation.names import GROUP, KUEUE_GROUP, POOLS, TENANT_LABEL, TENANTS, VERSION
from services.colocation.observe.objects import Object
from services.colocation.observe.store import Store
from services.colocation.reconcile import Reconciler
from services.colocation.settings import OperatorSettings
from services.colocation.slo.watch import SloWatch
from services.common.logging import get_logger

RETRY_SECONDS = 1.0

Setter = Callable[[Object, bool], bool]


class Watched:
    """Feeds a store from kopf's watches.

    kopf calls event handlers only once it has indexed every kind, and the indexers feed the store too, so the first
    event means that the store is complete.
    """

    def __init__(self, store: Store) -> None:
        self.changed = asyncio.Event()
        self.complete = asyncio.Event()
        self.registry = kopf.OperatorRegistry()
        kopf.on.login(registry=self.registry)(_log_in)
        kinds: tuple[tuple[tuple[str, str, str], Setter, dict[str, Any]], ...] = (
            ((GROUP, VERSION, POOLS), store.set_pool, {}),
            ((GROUP, VERSION, TENANTS), store.set_tenant, {}),
            (("batch", "v1", "jobs"), store.set_job, {"labels": {TENANT_LABEL: kopf.PRESENT}}),
            (("", "v1", "nodes"), store.set_node, {}),
            (("", "v1", "pods"), store.set_pod, {}),
        )
        for resource, setter, only in kinds:
            self._watch(resource, setter, only)

    def _watch(self, resource: tuple[str, str, str], setter: Setter, only: dict[str, Any]) -> None:
        @kopf.index(*resource, id=f"{resource[2]}-seen", registry=self.registry, **only)
        async def seen(body: kopf.Body, **_: Any) -> None:
            setter(_plain(body), False)

        @kopf.on.event(*resource, id=f"{resource[2]}-changed", registry=self.registry, **only)
        async def happened(event: kopf.RawEvent, **_: Any) -> None:
            if setter(event["object"], event["type"] == "DELETED") or not self.complete.is_set():
                self.changed.set()
            self.complete.set()


def _log_in(**arguments: Any) -> kopf.ConnectionInfo | None:
    """In a pod as its service account, elsewhere as kubectl."""
    return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)


def _plain(body: kopf.Body) -> Object:
    return dict(body)


def main(settings: OperatorSettings) -> int:
    """Run until SIGTERM or SIGINT. The tenants that run go on without it."""
    asyncio.run(_main(settings))
    return 0


async def _main(settings: OperatorSettings) -> None:
    await load_config()  # type: ignore[no-untyped-call]
    metrics = OperatorMetrics()
    if settings.metrics_port:
        start_http_server(settings.metrics_port, registry=metrics.registry)
    store = Store()
    watched = Watched(store)
    async with ApiClient() as client:
        api = Api(client)

        async def act() -> None:
            await _act(settings, store, watched, api, metrics)

        health = f"http://0.0.0.0:{settings.health_port}/healthz" if settings.health_port else None
        watching = kopf.operator(
            registry=watched.registry,
            settings=_kopf_settings(),
            clusterwide=True,
            standalone=True,
            liveness_endpoint=health,
        )
        # kopf ends on a signal, the other never: whichever does, the process does.
        tasks = [asyncio.create_task(watching), asyncio.create_task(Election(client, settings).lead(act))]
        ended, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task in ended:
            task.result()


async def _act(settings: OperatorSettings, store: Store, watched: Watched, api: Api, metrics: OperatorMetrics) -> None:
    """What the leader does, until it is cancelled."""
    log = get_logger()
    log.info("leading", identity=settings.replica)
    metrics.leading.set(1)
    try:
        await watched.complete.wait()
        resizable = settings.resize == "auto" and await _answer(api.can_resize)
        kueue = await _answer(lambda: api.has_group(KUEUE_GROUP))
        log.info("watching", nodes=len(store.nodes), tenants=len(store.tenants), resizable=resizable, kueue=kueue)
        executor = Executor(api, store, settings.replica, settings.priority_class, kueue=kueue)
        slo = SloWatch(settings.scrape_timeout)
        limit = timedelta(seconds=settings.start_limit)
        reconciler = Reconciler(
            store,
            api,
            executor,
            slo,
            metrics,
            resizable=resizable,
            start_limit=limit,
            sweep_seconds=settings.sweep,
        )
        while True:
            watched.changed.clear()
            try:
                await reconciler.round()
            except Exception:
                # A fault of ours must not stop the guard: it is loud, and the next round starts afresh.
                log.exception("round_failed")
                metrics.failures.labels("round").inc()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(watched.changed.wait(), settings.interval)
                await asyncio.sleep(settings.settle)
    finally:
        metrics.leading.set(0)


async def _answer(ask: Callable[[], Awaitable[bool]]) -> bool:
    """Of an API server that may be away for now."""
    while True:
        try:
            return await ask()
        except CALL_ERRORS as error:
            get_logger().warning("api_unreachable", error=describe(error))
            await asyncio.sleep(RETRY_SECONDS)


def _kopf_settings() -> kopf.OperatorSettings:
    """kopf only watches here: no events or annotations of its own, no scan for new kinds."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True
    made.watching.server_timeout = 300
    made.networking.error_backoffs = (1, 1, 2, 3, 5)
    return made
