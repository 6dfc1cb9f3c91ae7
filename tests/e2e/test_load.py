"""1,000 requests over 64 connections, a third of them cancelled at random times: everything ends, nothing leaks."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import grpc
from blink.v1 import inference_pb2, inference_pb2_grpc

from tests.e2e.conftest import Launch
from tests.e2e.product import LIMIT, request, until

Call = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]

REQUESTS = 1000
CONNECTIONS = 64
IN_FLIGHT = 192  # more than the slots of both workers, so that some requests are refused and come again


async def test_every_request_ends_with_a_status_and_slots_and_pages_come_back(launch: Launch) -> None:
    product = launch("--workers", "2", "--set", "bootstrap.max_waiting=64", "--set", "bootstrap.kv_tokens=8192")
    start = await asyncio.to_thread(product.load)
    rng = random.Random(0)
    outcomes: Counter[str] = Counter()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(product.address, options=options) for _ in range(CONNECTIONS)]
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one(number: int, tokens: int, prompt: str, cancel_after: float | None) -> None:
        stub = inference_pb2_grpc.InferenceStub(channels[number % CONNECTIONS])
        message = request(prompt, tokens, request_id=f"load-{number}")
        while True:
            async with gate:
                outcome = await read(stub.Generate(message, timeout=LIMIT), tokens, cancel_after)
            outcomes[outcome] += 1
            if outcome != "RESOURCE_EXHAUSTED":
                return
            await asyncio.sleep(0.05)

    async def read(call: Call, tokens: int, cancel_after: float | None) -> str:
        if cancel_after is not None:
            asyncio.get_running_loop().call_later(cancel_after, call.cancel)
        ids, finished = 0, False
        try:
            async for event in call:
                assert not finished
                ids += len(event.chunk.token_ids)
                finished = event.WhichOneof("event") == "finished"
        except grpc.aio.AioRpcError as error:
            return error.code().name
        except asyncio.CancelledError:
            return "CANCELLED"
        assert finished, "the stream ended as OK without finished"
        assert ids == tokens
        return "OK"

    jobs = []
    for number in range(REQUESTS):
        cancel_after = rng.expovariate(10) if number % 3 == 0 else None
        jobs.append(one(number, rng.randint(1, 48), "he" * rng.randint(1, 60), cancel_after))
    try:
        await asyncio.gather(*jobs)
    finally:
        for channel in channels:
            await channel.close()
    assert set(outcomes) <= {"OK", "CANCELLED", "RESOURCE_EXHAUSTED"}, outcomes
    assert outcomes["OK"] + outcomes["CANCELLED"] == REQUESTS
    assert outcomes["OK"] >= REQUESTS * 2 // 3
    assert outcomes["CANCELLED"] > 0

    def quiet() -> bool:
        load = product.load()
        return (load.free_slots, load.free_kv_pages, load.running_requests, load.waiting_requests) == (
            start.free_slots, start.free_kv_pages, 0, 0,
        )  # fmt: skip

    await asyncio.to_thread(until, quiet, lambda: str(product.load()))
    assert product.stop() == 0
    assert product.left_behind() == []
