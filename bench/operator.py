"""``python -m bench.operator``: the operator's loop against an API server that keeps objects and nothing else.

For each size, CPU seconds of a decision, CPU seconds of the rest of the round, and API calls: of the rounds that start
everybody who fits, of rounds in which a share of the tenants ends and others follow, and of rounds at rest; and of one
sweep, which compares what is known with lists of all names. The API server is an HTTP server of this process with merge
patches and resource versions: serializing, connections and parsing are real, and its own CPU time is counted, too. No
controller, scheduler or kubelet takes time: what is released runs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import structlog
import uvicorn
from kubernetes.aio.client import ApiClient, Configuration
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from services.colocation.apply.api import Api
from services.colocation.apply.executor import Executor
from services.colocation.apply.sweep import Sweep
from services.colocation.decision.decide import decide
from services.colocation.metrics import OperatorMetrics
from services.colocation.names import TENANT_LABEL
from services.colocation.observe.objects import Object, timestamp
from services.colocation.observe.store import Store
from services.colocation.reconcile import Reconciler
from services.colocation.slo.watch import SloWatch

Json = dict[str, Any]
API = "/apis/blink.dev/v1alpha1"
CORES = 16
LEAST = (1, 2, 3)  # of tenants in turn: more than there is room for
MOST = 4
ENDS_PER_ROUND = 0.01
ROUNDS = 5
SIZES = ((100, 1_000), (250, 2_500), (500, 5_000), (1_000, 10_000))


class Server:
    """Objects by path. What the API server would refuse is not checked."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self._versions = itertools.count(1)
        self._server: uvicorn.Server | None = None

    def add(self, path: str, thing: Json) -> Json:
        thing["metadata"] |= {"uid": path, "generation": 1, "creationTimestamp": timestamp(datetime.now(UTC))}
        return self._keep(path, thing)

    async def serve(self) -> int:
        """Start; returns the port."""
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST", "PATCH", "DELETE"])])
        self._server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="error", access_log=False, lifespan="off", timeout_keep_alive=600)
        )
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.01)
        port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        await self._task

    async def _answer(self, request: Request) -> JSONResponse:
        path = request.url.path.removesuffix("/status")
        if request.method == "GET":
            return JSONResponse(self._names(path.rpartition("/")[2]))
        if request.method == "DELETE":
            self.objects.pop(path, None)
            return JSONResponse({})
        body = json.loads(await request.body())
        if request.method == "POST":
            name = body["metadata"].get("name")
            return JSONResponse(self.add(f"{path}/{name}", body) if name else body, HTTPStatus.CREATED)
        return JSONResponse(self.change(path, body))

    def _names(self, plural: str) -> Json:
        """Of all objects of a kind, as PartialObjectMetadataList has them."""
        found = [{"metadata": t["metadata"]} for path, t in self.objects.items() if path.split("/")[-2] == plural]
        return {"metadata": {"resourceVersion": str(next(self._versions))}, "items": found}

    def change(self, path: str, patch: Json) -> Json:
        return self._keep(path, _merged(self.objects[path], patch))

    def _keep(self, path: str, thing: Json) -> Json:
        thing["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[path] = thing
        return thing


def _merged(thing: Json, patch: Json) -> Json:
    """RFC 7386."""
    made = dict(thing)
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = _merged(made.get(name, {}), value) if isinstance(value, dict) else value
    return made


@dataclass
class Row:
    """One kind of round: means, in seconds of CPU time and calls; of a start, the sum of its rounds."""

    name: str
    decide: float
    apply: float
    calls: float
    by_kind: Counter[str]


class Bench:
    """A cluster of ``nodes`` and ``tenants``, and the operator's loop on it."""

    def __init__(self, nodes: int, tenants: int) -> None:
        self.server = Server()
        self.store = Store()
        self.metrics = OperatorMetrics()
        for index in range(nodes):
            self.store.set_node(self.server.add(f"/api/v1/nodes/n{index}", _node(f"n{index}")), gone=False)
        pool = {"nodeSelector": {"pool": "p"}, "serving": {"baselineCores": 4}}
        self.store.set_pool(
            self.server.add(
                "/apis/blink.dev/v1alpha1/tenantpools/p",
                {"kind": "TenantPool", "metadata": {"name": "p"}, "spec": pool},
            ),
            gone=False,
        )
        for index in range(tenants):
            thing = _tenant(f"t{index}", f"team-{index % 20}", LEAST[index % len(LEAST)])
            path = f"{API}/namespaces/{thing['metadata']['namespace']}/tenants/t{index}"
            self.store.set_tenant(self.server.add(path, thing), gone=False)

    async def run(self) -> list[Row]:
        port = await self.server.serve()
        configuration = Configuration(host=f"http://127.0.0.1:{port}")
        async with ApiClient(configuration) as client:
            api = Api(client)
            executor = Executor(api, self.store, "bench", "")
            loop = Reconciler(self.store, api, executor, SloWatch(1.0), self.metrics, resizable=True)
            start = await self._rounds("start", loop, api, 3, start=True)
            turnover = await self._rounds("1% end", loop, api, ROUNDS, ends=True)
            await self._rounds("settle", loop, api, 2)
            rest = await self._rounds("rest", loop, api, ROUNDS)
            swept = await self._sweep(api)
        await self.server.stop()
        return [start, turnover, rest, swept]

    async def _sweep(self, api: Api) -> Row:
        """One look for what went unseen by the watches; the operator takes one every five minutes."""
        before, begin = Counter(api.calls), time.process_time()
        await Sweep(api, self.store, 0.0).when_due()
        calls = Counter(api.calls) - before
        return Row("sweep", 0.0, time.process_time() - begin, calls.total(), calls)

    async def _rounds(
        self, name: str, loop: Reconciler, api: Api, count: int, *, ends: bool = False, start: bool = False
    ) -> Row:
        times: list[tuple[float, float]] = []
        before = Counter(api.calls)
        for _ in range(count):
            if ends:
                self._end_some()
            begin = time.process_time()
            decide(self.store.cluster(datetime.now(UTC), {}, resizable=True))
            decided = time.process_time() - begin
            await loop.round()
            times.append((decided, time.process_time() - begin - 2 * decided))
            self._play()
        calls = Counter(api.calls) - before
        per = 1 if start else count
        deciding, acting = (sum(column) / per for column in zip(*times, strict=True))
        return Row(name, deciding, acting, calls.total() / per, calls)

    def _play(self) -> None:
        """Job controller, scheduler and kubelet: what is released runs."""
        for key, job in self.store.jobs.items():
            if not job["spec"].get("suspend") and not any(True for _ in self.store.pods_of(key)):
                pod = _pod(key.namespace, key.name, job)
                self.server.objects[f"/api/v1/namespaces/{key.namespace}/pods/{key.name}-x"] = pod
                self.store.set_pod(pod, gone=False)

    def _end_some(self) -> None:
        running = [key for key, job in self.store.jobs.items() if not job["spec"].get("suspend") and not _done(job)]
        for key in running[: max(1, round(len(running) * ENDS_PER_ROUND))]:
            path = f"/apis/batch/v1/namespaces/{key.namespace}/jobs/{key.name}"
            complete = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
            self.store.set_job(self.server.change(path, complete), gone=False)
            for pod in list(self.store.pods_of(key)):
                self.store.set_pod(pod, gone=True)


def _done(job: Object) -> bool:
    return bool((job.get("status") or {}).get("conditions"))


def _node(name: str) -> Json:
    ready = [{"type": "Ready", "status": "True"}]
    return {
        "metadata": {"name": name, "labels": {"pool": "p", "kubernetes.io/hostname": name}},
        "spec": {},
        "status": {"allocatable": {"cpu": str(CORES), "memory": "64Gi"}, "conditions": ready},
    }


def _tenant(name: str, namespace: str, least: int) -> Json:
    container = {"name": "main", "image": "x", "resources": {"limits": {"memory": "1Gi"}}}
    template = {"spec": {"template": {"spec": {"containers": [container]}}}}
    spec = {"pool": "p", "cores": {"min": least, "max": MOST}, "template": template}
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


def _pod(namespace: str, of: str, job: Object) -> Json:
    metadata = {
        "name": f"{of}-x",
        "namespace": namespace,
        "labels": {TENANT_LABEL: of},
        "ownerReferences": [{"uid": job["metadata"]["uid"]}],
        "resourceVersion": job["metadata"]["resourceVersion"],
    }
    spec = job["spec"]["template"]["spec"]
    node = job["metadata"]["annotations"]["blink.dev/node"]
    return {"metadata": metadata, "spec": {**spec, "nodeName": node}, "status": {"phase": "Running"}}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two decisions at rest")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print(f"{'nodes':>6} {'tenants':>8} {'round':<8} {'decide s':>9} {'act s':>8} {'calls':>8} {'µs/tenant':>10}")
    for nodes, tenants in SIZES:
        for row in asyncio.run(Bench(nodes, tenants).run()):
            each = (row.decide + row.apply) / tenants * 1e6
            figures = f"{row.decide:>9.3f} {row.apply:>8.2f} {row.calls:>8.0f} {each:>10.0f}"
            print(f"{nodes:>6} {tenants:>8} {row.name:<8} {figures}")
            if row.name == "start":
                print("        ", ", ".join(f"{kind}: {count}" for kind, count in row.by_kind.most_common()))
            if row.name == "rest":
                print(f"         {row.calls * 60 / arguments.interval:.0f} calls a minute at rest")


if __name__ == "__main__":
    main()
