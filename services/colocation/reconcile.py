"""One round: look, decide, act, report."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http import HTTPStatus

from kubernetes.aio.client.exceptions import ApiException

from services.colocation.apply.api import Api, Json, describe, is_lasting
from services.colocation.apply.executor import CALL_ERRORS, Executor
from services.colocation.apply.status import differs, pool_status, tenant_status
from services.colocation.apply.sweep import Sweep
from services.colocation.decision.actions import (
    Action,
    CreateJob,
    Evict,
    Fail,
    Phase,
    Plan,
    Reason,
    Release,
    Resize,
    Suspend,
    TenantReport,
)
from services.colocation.decision.decide import decide
from services.colocation.decision.model import START_LIMIT, Cluster, Key, Tenant
from services.colocation.errors import InvalidObjectError
from services.colocation.metrics import OperatorMetrics
from services.colocation.names import FINALIZER
from services.colocation.observe.objects import ENDED, NO_POD, Object
from services.colocation.observe.store import Store
from services.colocation.slo.watch import SloWatch
from services.common.logging import get_logger

# Cores are taken before they are given.
_FIRST, _THEN, _LAST = (Suspend, Evict, Fail), (Resize, CreateJob), (Release,)
MOVES = (Release, Resize, Suspend, Evict, Fail)


class Reconciler:
    """Idempotent: a round that was cut off anywhere is made good by the next."""

    def __init__(
        self,
        store: Store,
        api: Api,
        executor: Executor,
        slo: SloWatch,
        metrics: OperatorMetrics,
        *,
        resizable: bool,
        start_limit: timedelta = START_LIMIT,
        sweep_seconds: float = 300.0,
    ) -> None:
        self._store = store
        self._api = api
        self._executor = executor
        self._slo = slo
        self._metrics = metrics
        self._resizable = resizable
        self._start_limit = start_limit
        self._sweep = Sweep(api, store, sweep_seconds)
        self._refused: dict[Key, str] = {}  # in this round, with why
        self._log = get_logger()

    async def round(self) -> Plan:
        """Never raises for what the API server refuses or does not answer: it is counted, logged and tried again."""
        guards = {n: p["spec"]["sloGuard"] for n, p in self._store.pools.items() if "sloGuard" in p["spec"]}
        await self._slo.look(guards)
        await self._try("sweep", self._sweep.when_due)
        with self._metrics.reconcile.labels("decide").time():
            cluster = self._store.cluster(datetime.now(UTC), self._slo.readings, self._resizable, self._start_limit)
            cluster = await self._with_reasons(cluster)
            plan = decide(cluster)
        self._metrics.show(plan, cluster.pools)
        with self._metrics.reconcile.labels("apply").time():
            await self._claim_objects()
            self._refused.clear()
            done: set[Key] = set()
            short: set[str] = set()  # nodes on which a tenant did not give what it was to give
            for kinds in (_FIRST, _THEN, _LAST):
                acts = [a for a in plan.actions if isinstance(a, kinds) and a.key not in self._refused]
                acts = [action for action in acts if not (isinstance(action, Release) and action.node in short)]
                for action, well in zip(acts, await self._all(acts), strict=True):
                    if well and isinstance(action, MOVES):
                        done.add(action.key)
                    elif isinstance(action, Resize):
                        short.add(plan.tenants[action.key].node)
            failed = {a.key for a in plan.actions if isinstance(a, MOVES)} - done
            await self._report_tenants(plan, cluster.now, done, failed)
            await self._report_pools(plan, cluster)
            await self._finish(cluster)
        return plan

    async def _all(self, actions: list[Action]) -> list[bool]:
        return list(await asyncio.gather(*(self._act(action) for action in actions)))

    async def _act(self, action: Action) -> bool:
        kind = type(action).__name__
        well = await self._try(kind, lambda: self._carry_out(action))
        if action.key in self._refused:
            why = self._refused[action.key]
            await self._try(
                "event", lambda: self._executor.explain(replace(action, reason=Reason.REFUSED, message=why))
            )
        if well:
            self._metrics.actions.labels(kind, action.reason.value).inc()
            await self._try("event", lambda: self._executor.explain(action))
            self._log.info("acted", action=kind, tenant=str(action.key), reason=action.reason, message=action.message)
        return well

    async def _carry_out(self, action: Action) -> None:
        """Do it, and remember who can't be started as it is: it would be in the way of others for ever."""
        try:
            await self._executor.carry_out(action)
        except ApiException as error:
            if isinstance(action, CreateJob | Release) and is_lasting(error):
                self._refused[action.key] = f"its Job is refused: {describe(error)}"
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # Of one tenant's template, which may be anything that is JSON; others must not suffer for it.
            self._log.exception("tenant_failed", tenant=str(action.key))
            self._refused[action.key] = f"no Job can be made of its template: {error!r}"
            raise InvalidObjectError(self._refused[action.key]) from error

    async def _with_reasons(self, cluster: Cluster) -> Cluster:
        """Of tenants that are to make room as they got no pod: with what their Job's events say of it."""
        latest = cluster.now - self._start_limit
        stuck = [
            t for t in cluster.tenants if t.pending_why == NO_POD and t.pending_since and t.pending_since <= latest
        ]
        if not stuck:
            return cluster
        whys = dict(zip(stuck, await asyncio.gather(*map(self._why_no_pod, stuck)), strict=True))
        return replace(
            cluster,
            tenants=tuple(replace(t, pending_why=whys[t]) if t in whys else t for t in cluster.tenants),
        )

    async def _why_no_pod(self, tenant: Tenant) -> str:
        try:
            return await self._api.last_warning(tenant.key, "Job") or NO_POD
        except CALL_ERRORS as error:
            self._log.warning("events_unreadable", tenant=str(tenant.key), error=describe(error))
            return NO_POD

    async def _claim_objects(self) -> None:
        """Have nothing deleted before the operator has cleaned up after it."""
        await asyncio.gather(
            *(
                self._pool_finalizer(name, pool, add=True)
                for name, pool in self._store.pools.items()
                if _unclaimed(pool)
            ),
            *(
                self._tenant_finalizer(key, tenant, add=True)
                for key, tenant in self._store.tenants.items()
                if _unclaimed(tenant)
            ),
        )

    async def _finish(self, cluster: Cluster) -> None:
        """Let go what is being deleted and has nothing left in the cluster."""
        for key, thing in list(self._store.tenants.items()):
            if "deletionTimestamp" in thing["metadata"] and FINALIZER in _finalizers(thing):
                await self._try("finish", lambda key=key, thing=thing: self._finish_tenant(key, thing))  # type: ignore[misc]
        in_use = {tenant.pool for tenant in cluster.tenants if tenant.placement is not None}
        for name, pool in list(self._store.pools.items()):
            if "deletionTimestamp" in pool["metadata"] and name not in in_use and FINALIZER in _finalizers(pool):
                await self._pool_finalizer(name, pool, add=False)

    async def _finish_tenant(self, key: Key, thing: Object) -> None:
        if await self._executor.finish(thing):
            await self._tenant_finalizer(key, thing, add=False)

    async def _pool_finalizer(self, name: str, pool: Object, add: bool) -> None:
        patch, last = _finalizer_patch(pool, add)

        async def write() -> None:
            self._store.set_pool(await self._api.patch_pool(name, patch), last)

        await self._try("finalizer", write)

    async def _tenant_finalizer(self, key: Key, tenant: Object, add: bool) -> None:
        patch, last = _finalizer_patch(tenant, add)

        async def write() -> None:
            self._store.set_tenant(await self._api.patch_tenant(key, patch), last)

        await self._try("finalizer", write)

    async def _report_tenants(self, plan: Plan, now: datetime, done: set[Key], failed: set[Key]) -> None:
        writes = []
        for key, planned in plan.tenants.items():
            thing, refused = self._store.tenants.get(key), self._refused.get(key)
            if thing is None or (key in failed and refused is None):  # what was not done is not reported as done
                continue
            if (thing.get("status") or {}).get("phase") in ENDED:  # how it ended has been told, and why
                continue
            report = planned
            if refused is not None:
                report = TenantReport(Phase.WAITING, Reason.REFUSED, refused, queued=planned.queued)
            status = tenant_status(thing, report, now, moved=key in done)
            if differs(thing, status):
                writes.append(self._write_tenant(key, status))
        await asyncio.gather(*writes)

    async def _write_tenant(self, key: Key, status: dict[str, object]) -> None:
        async def write() -> None:
            self._store.set_tenant(await self._api.patch_tenant(key, {"status": status}, status=True), gone=False)

        await self._try("status", write)

    async def _report_pools(self, plan: Plan, cluster: Cluster) -> None:
        for pool in cluster.pools:
            thing = self._store.pools.get(pool.name)
            if thing is None:  # it went while the round was under way
                continue
            report, before = plan.pools[pool.name], pool.guard.stage
            error = self._slo.errors.get(pool.name, "")
            await self._write_pool(thing, pool_status(thing, pool, report, error, cluster.now))
            if report.guard.stage is not before:
                text = f"stage {before} -> {report.guard.stage}"
                await self._try("event", lambda t=thing, m=text: self._executor.tell(t, "TenantPool", "GuardMoved", m))  # type: ignore[misc]

    async def _write_pool(self, thing: Object, status: dict[str, object]) -> None:
        if not differs(thing, status):
            return

        async def write() -> None:
            name = thing["metadata"]["name"]
            self._store.set_pool(await self._api.patch_pool(name, {"status": status}, status=True), gone=False)

        await self._try("status", write)

    async def _try(self, what: str, call: Callable[[], Awaitable[object]]) -> bool:
        try:
            await call()
        except (*CALL_ERRORS, InvalidObjectError) as error:
            if isinstance(error, ApiException) and error.status == HTTPStatus.NOT_FOUND:
                return False  # it went meanwhile, and a watch will tell
            self._metrics.failures.labels(what).inc()
            self._log.warning("call_failed", action=what, error=describe(error))
            return False
        return True


def _finalizers(thing: Object) -> list[str]:
    return list(thing["metadata"].get("finalizers") or ())


def _unclaimed(thing: Object) -> bool:
    return FINALIZER not in _finalizers(thing) and "deletionTimestamp" not in thing["metadata"]


def _finalizer_patch(thing: Object, add: bool) -> tuple[Json, bool]:
    """What adds or takes away the operator's finalizer, and whether the object is gone then."""
    others = [each for each in _finalizers(thing) if each != FINALIZER]
    metadata = {
        "finalizers": [*others, FINALIZER] if add else others,
        "resourceVersion": thing["metadata"]["resourceVersion"],
    }
    return {"metadata": metadata}, not add and not others
