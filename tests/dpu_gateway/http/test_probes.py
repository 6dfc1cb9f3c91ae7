from __future__ import annotations

import signal
from pathlib import Path

import httpx2
import pytest
import trustme
from openai import AsyncOpenAI

from tests.dpu_gateway.harness import MODEL, gateway, until
from tests.dpu_gateway.http.clients import http_client, openai_client
from tests.dpu_gateway.test_drain import WorkerProcess, worker_process
from tests.dpu_gateway.test_tls import Files
from tests.support.stand_in_engine import Behaviour

OWN_HEALTH = "--health-listen=127.0.0.1:0"


async def test_the_served_model_is_listed_and_shown() -> None:
    async with gateway() as system, openai_client(system) as client:
        assert isinstance(client, AsyncOpenAI)
        models = await client.models.list()
        assert [model.id for model in models.data] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "blink"


async def test_health_is_the_workers_and_ready_is_the_engines() -> None:
    async with gateway() as system, http_client(system) as client:
        await until(lambda: system.session.liveness.serving)
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        await system.kill_engine()
        await until(lambda: system.workers[0].link.session is None)
        assert (await client.get("/health")).status_code == 200
        response = await client.get("/ready")
        assert response.status_code == 503
        assert "heartbeat stopped" in response.json()["error"]["message"]


async def test_a_draining_worker_is_not_ready() -> None:
    async with gateway() as system, http_client(system) as client:
        system.workers[0].generations.draining = True
        response = await client.get("/ready")
        assert response.status_code == 503
        assert "stopping" in response.json()["error"]["message"]


async def ask(worker: WorkerProcess, path: str, patience: float = 10.0) -> int:
    """As a kubelet does, for one worker's container: over a connection of its own, by plain HTTP."""
    async with httpx2.AsyncClient(timeout=patience) as client:
        return (await client.get(f"http://127.0.0.1:{worker.health_port}{path}")).status_code


async def test_of_workers_that_share_their_ports_each_is_judged_by_itself() -> None:
    async with (
        gateway(Behaviour(), workers=0) as system,
        worker_process(system, "--worker=0", OWN_HEALTH) as stuck,
        worker_process(system, "--worker=1", OWN_HEALTH, port=stuck.port, http_port=stuck.http_port) as well,
    ):
        assert well.http_port == stuck.http_port
        assert well.health_port != stuck.health_port
        for worker in (stuck, well):
            assert [await ask(worker, path) for path in ("/health", "/ready")] == [200, 200]
        stuck.process.send_signal(signal.SIGSTOP)
        for _ in range(8):  # connections to a shared port are dealt out: some would find the stopped one
            assert await ask(well, "/health") == 200
            with pytest.raises(httpx2.TimeoutException):
                await ask(stuck, "/health", patience=0.2)
        stuck.process.send_signal(signal.SIGCONT)
        assert await ask(stuck, "/health") == 200


async def test_a_workers_own_port_tells_its_health_and_nothing_else() -> None:
    async with gateway(workers=0) as system, worker_process(system, OWN_HEALTH) as worker:
        for path in ("/metrics", "/v1/models", "/openapi.json", "/v1/completions"):
            assert await ask(worker, path) == 404


async def test_a_workers_own_port_needs_no_certificate_where_the_others_do(tmp_path: Path) -> None:
    authority, files = trustme.CA(), Files(tmp_path)
    files.issue(authority)
    files.client_ca.write_bytes(authority.cert_pem.bytes())
    flags = [*files.flags, f"--tls-client-authority={files.client_ca}", OWN_HEALTH]
    async with gateway(workers=0) as system, worker_process(system, *flags) as worker:
        assert [await ask(worker, path) for path in ("/health", "/ready")] == [200, 200]


async def test_a_worker_that_drains_lives_and_is_not_ready_at_its_own_port() -> None:
    async with gateway(workers=1, health_listen="127.0.0.1:0") as system, httpx2.AsyncClient() as client:
        (worker,) = system.workers
        worker.generations.draining = True
        url = f"http://127.0.0.1:{worker.health_port}"
        assert (await client.get(f"{url}/health")).status_code == 200
        assert (await client.get(f"{url}/ready")).status_code == 503
