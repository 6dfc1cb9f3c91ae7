from __future__ import annotations

from openai import AsyncOpenAI

from tests.dpu_gateway.harness import MODEL, gateway, until
from tests.dpu_gateway.http.clients import http_client, openai_client


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
