"""Worker processes that share one port answer a scrape for all of them."""

from __future__ import annotations

import grpc
import httpx2
from blink.v1 import inference_pb2_grpc

from services.dpu_gateway.metrics.sharing import SharedFigures
from tests.dpu_gateway.harness import LEASE_TIMEOUT_MS, collect, gateway, max_tokens, text_request
from tests.dpu_gateway.metrics.scraped import Scraped, scrape
from tests.dpu_gateway.test_drain import WorkerProcess, worker_process
from tests.support.stand_in_engine import Behaviour

ENDS = "blink_request_success_total"


async def ask(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        result = await collect(inference_pb2_grpc.InferenceStub(channel).Generate(text_request(stop=max_tokens(2))))
    assert result.code is grpc.StatusCode.OK


async def look(worker: WorkerProcess) -> Scraped:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{worker.http_port}") as client:
        return await scrape(client)


async def test_each_worker_answers_for_all_and_a_killed_ones_figures_go_on() -> None:
    async with gateway(Behaviour(lease_timeout=LEASE_TIMEOUT_MS / 1000), workers=0) as system:
        directory = SharedFigures.directory(system.directory, "default")
        async with worker_process(system, "--worker=0") as first:
            async with worker_process(system, "--worker=1") as second:
                for worker, times in ((first, 1), (second, 2)):
                    for _ in range(times):
                        await ask(worker.port)
                for worker in (first, second):
                    seen = await look(worker)
                    assert seen.value(ENDS, finished_reason="length") == 3
                    assert seen.value("blink_time_to_first_token_seconds_count") == 3
                    assert seen.value("blink_gateway_open_requests") == 0
                second.process.kill()
                await second.process.wait()
            assert (await look(first)).value(ENDS) == 3
            async with worker_process(system, "--worker=1") as again:
                await ask(again.port)
                seen = await look(first)
                assert seen.value(ENDS) == 4
                assert seen.value("blink_gateway_open_requests") == 0
                again.process.terminate()
                assert await again.end() == 0
            assert (await look(first)).value(ENDS) == 1
            first.process.terminate()
            assert await first.end() == 0
        assert not directory.exists()
