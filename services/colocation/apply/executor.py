"""Carries actions out. Each can be done again without harm, so a crash in between costs nothing."""

from __future__ import annotations

from datetime import UTC, datetime

from aiohttp import ClientError
from kubernetes.aio.client.exceptions import ApiException

from services.colocation.apply.api import Api, Json
from services.colocation.apply.jobs import bound, job_cores, job_manifest, placement_annotations, queue_of
from services.colocation.decision.actions import Action, CreateJob, Evict, Fail, Reason, Release, Resize, Suspend
from services.colocation.decision.model import Key
from services.colocation.names import CORES_ANNOTATION, GROUP, QUEUE_LABEL, RDT_ANNOTATION, VERSION
from services.colocation.observe.objects import Object, belongs, queued, timestamp
from services.colocation.observe.store import Store

CONTROLLER = "blink.dev/operator"
MAX_NOTE = 1000
_WARNINGS = {Reason.NOT_STARTED, Reason.REFUSED}


class Executor:
    """Writes what it did through to ``store``, so that the next decision need not wait for a watch to show it.

    Where ``kueue`` is installed, a Job that names a queue gets its label with its node, and Kueue alone unsuspends it.
    """

    def __init__(self, api: Api, store: Store, identity: str, priority_class: str, *, kueue: bool = False) -> None:
        self._api = api
        self._store = store
        self._identity = identity
        self._priority_class = priority_class
        self._kueue = kueue

    async def carry_out(self, action: Action) -> None:
        """Do it. Raises one of CALL_ERRORS."""
        tenant = self._store.tenants.get(action.key)
        if tenant is None:
            return
        match action:
            case CreateJob():
                await self._create(tenant, tenant["spec"]["cores"]["min"], "")
            case Release():
                await self._release(tenant, action)
            case Resize():
                await self._resize(action.key, action.cores)
            case Suspend():
                await self._suspend(action.key)
            case Evict():
                await self._suspend(action.key)
                for pod in list(self._store.pods_of(action.key)):
                    await self._api.kill_pod(Key(action.key.namespace, pod["metadata"]["name"]))
            case Fail():
                await self._remove(action.key)

    async def explain(self, action: Action) -> None:
        """Tell the tenant's events what was done, and why."""
        tenant = self._store.tenants.get(action.key)
        if tenant is not None:
            warning = isinstance(action, Evict | Fail) or action.reason in _WARNINGS
            await self.tell(tenant, "Tenant", action.reason, action.message, warning=warning)

    async def finish(self, tenant: Object) -> bool:
        """A Tenant is being deleted: remove its Job. Returns whether nothing of it is left."""
        key = Key(tenant["metadata"]["namespace"], tenant["metadata"]["name"])
        await self._remove(key)
        return not any(True for _ in self._store.pods_of(key))

    async def tell(self, thing: Object, kind: str, reason: str, message: str, warning: bool = False) -> None:
        """An event about a Tenant or TenantPool."""
        metadata = thing["metadata"]
        namespace = metadata.get("namespace", "default")
        await self._api.create_event(
            namespace,
            {
                "apiVersion": "events.k8s.io/v1",
                "kind": "Event",
                "metadata": {"generateName": f"{metadata['name']}-", "namespace": namespace},
                "regarding": {
                    "apiVersion": f"{GROUP}/{VERSION}",
                    "kind": kind,
                    "name": metadata["name"],
                    "namespace": metadata.get("namespace"),
                    "uid": metadata["uid"],
                },
                "action": "Reconcile",
                "reason": str(reason),
                "note": message[:MAX_NOTE],
                "type": "Warning" if warning else "Normal",
                "eventTime": timestamp(datetime.now(UTC), "microseconds"),
                "reportingController": CONTROLLER,
                "reportingInstance": self._identity,
            },
        )

    async def _create(self, tenant: Object, cores: int, node: str, queue: str = "") -> Json:
        manifest = job_manifest(
            tenant, cores, node, self._priority_class, queue=queue, rdt_class=self._rdt_class(tenant)
        )
        job = await self._api.create_job(manifest)
        self._store.set_job(job, gone=False)
        return job

    async def _release(self, tenant: Object, action: Release) -> None:
        job = self._store.job_of(action.key)
        queue = queue_of(tenant) if self._kueue else ""
        own = tenant["spec"]["template"]["spec"]["template"]["spec"].get("affinity")
        here = bound(own, action.node)
        if job is not None and self._is_stale(job, here, action.cores, self._rdt_class(tenant)):
            await self._remove(action.key)
            job = None
        if job is None:
            job = await self._create(tenant, action.cores, action.node, queue)
        spec: Json = {} if queue else {"suspend": False}
        if job["spec"]["template"]["spec"].get("affinity") != here:
            spec["template"] = {"spec": {"affinity": here}}
        metadata: Json = {"annotations": placement_annotations(action.cores, action.node)}
        if queue:
            metadata["labels"] = {QUEUE_LABEL: queue}
        released = {"metadata": metadata, "spec": spec}
        self._store.set_job(await self._api.patch_job(action.key, released), gone=False)

    @staticmethod
    def _is_stale(job: Object, here: Object, cores: int, rdt_class: str) -> bool:
        """Only a Job that never ran may be given another node, and none may be given another size or class.

        One that is left as it is goes on counting its completions and failures.
        """
        template = job["spec"]["template"]
        told = (template.get("metadata") or {}).get("annotations") or {}
        elsewhere = bool((job.get("status") or {}).get("startTime")) and template["spec"].get("affinity") != here
        return elsewhere or job_cores(job) != cores or told.get(RDT_ANNOTATION, "") != rdt_class

    def _rdt_class(self, tenant: Object) -> str:
        """The class of memory bandwidth that the tenant's pool names."""
        pool = self._store.pools.get(tenant["spec"]["pool"])
        return str(((pool or {"spec": {}})["spec"].get("ceilings") or {}).get("rdtClass", ""))

    async def _resize(self, key: Key, cores: int) -> None:
        job = self._store.job_of(key)
        for pod in list(self._store.pods_of(key)):
            metadata = pod["metadata"]
            if job is not None and belongs(pod, job) and "deletionTimestamp" not in metadata:
                container = pod["spec"]["containers"][0]["name"]
                changed = await self._api.resize_pod(Key(metadata["namespace"], metadata["name"]), container, cores)
                self._store.set_pod(changed, gone=False)
        annotations = {"metadata": {"annotations": {CORES_ANNOTATION: str(cores)}}}
        self._store.set_job(await self._api.patch_job(key, annotations), gone=False)

    async def _suspend(self, key: Key) -> None:
        job = self._store.job_of(key)
        if job is not None and queued(job):
            await self._remove(key)  # Kueue would start it again
        elif job is not None and not job["spec"].get("suspend"):
            self._store.set_job(await self._api.patch_job(key, {"spec": {"suspend": True}}), gone=False)

    async def _remove(self, key: Key) -> None:
        job = self._store.job_of(key)
        if job is not None:
            await self._api.delete_job(key, job["metadata"]["uid"])
            self._store.set_job(job, gone=True)


# What goes wrong between here and the API server; the next reconcile tries again.
CALL_ERRORS = (ApiException, ClientError, OSError, TimeoutError)
