"""Keys and limits as callers meet them, by gRPC and by HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import openai
import pytest
from blink.v1 import control_pb2, inference_pb2, inference_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from services.dpu_gateway.access.keys import new_key
from tests.dpu_gateway.harness import MODEL, Gateway, Result, collect, gateway, max_tokens, text_request, until
from tests.dpu_gateway.http.clients import http_client, openai_client
from tests.dpu_gateway.metrics.scraped import scrape
from tests.dpu_gateway.test_drain import worker_process
from tests.support.stand_in_engine import Behaviour

SECRET = "a prompt that no log may show"


class Keys:
    """A key file with one key for each test's need."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "keys.toml"
        self.free, self.one, self.rare, self.few = (new_key() for _ in range(4))
        self.path.write_text(
            f'[free]\nsha256 = "{self.free[1]}"\n'
            f'[one]\nsha256 = "{self.one[1]}"\nconcurrent_requests = 1\n'
            f'[rare]\nsha256 = "{self.rare[1]}"\nrequests_per_minute = 2\n'
            f'[few]\nsha256 = "{self.few[1]}"\nrequests_per_minute = 12\ntokens_per_minute = 60\n'
        )


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


async def generate(system: Gateway, key: str | None, request: inference_pb2.GenerateRequest) -> Result:
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    return await collect(system.inference().Generate(request, metadata=metadata))


async def test_every_call_of_grpc_needs_a_known_key(keys: Keys) -> None:
    async with gateway(Behaviour(tokens_per_second=20), api_keys=keys.path, workers=2) as system:
        for wrong in (None, "", "bk-wrong", keys.free[1]):
            refused = await generate(system, wrong, text_request())
            assert refused.code is grpc.StatusCode.UNAUTHENTICATED
            assert "API key" in refused.details
        for call in (
            system.inference().Abort(inference_pb2.AbortRequest(request_id="x")),
            system.control().GetLoad(control_pb2.GetLoadRequest()),
            system.control().GetModelInfo(control_pb2.GetModelInfoRequest()),
        ):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await generate(system, keys.free[0], text_request(stop=max_tokens(2)))).ids
        assert await system.health() == 1
        running = asyncio.create_task(generate(system, keys.free[0], text_request(request_id="far")))
        await until(lambda: any(lane.live.any() for lane in system.engine.lanes))
        metadata = (("authorization", f"Bearer {keys.free[0]}"),)
        abort = await system.inference(1).Abort(inference_pb2.AbortRequest(request_id="far"), metadata=metadata)
        assert abort.found  # by a peer, which asked for no key of its own
        await running


async def test_a_key_aborts_requests_of_its_own_alone_by_either_service_and_from_any_worker(keys: Keys) -> None:
    async with gateway(Behaviour(tokens_per_second=20), api_keys=keys.path, workers=2) as system:
        mine, other = ((("authorization", f"Bearer {key[0]}"),) for key in (keys.free, keys.one))
        request = text_request(request_id="same")
        running = [
            asyncio.create_task(collect(system.inference().Generate(request, metadata=key))) for key in (mine, other)
        ]  # one id, which the keys tell apart
        await until(lambda: sum(int(lane.live.sum()) for lane in system.engine.lanes) == 2)
        abort, stranger = inference_pb2.AbortRequest(request_id="same"), (("authorization", f"Bearer {keys.rare[0]}"),)
        for worker in range(2):
            assert not (await system.inference(worker).Abort(abort, metadata=stranger)).found
            engine = vllm_engine_pb2_grpc.VllmEngineStub(system.channel(worker))
            await engine.Abort(vllm_engine_pb2.AbortRequest(request_ids=["same"]), metadata=stranger)
        assert (await system.inference(1).Abort(abort, metadata=other)).found
        assert (await running[1]).finished.reason == inference_pb2.FINISH_REASON_CANCELLED
        assert not running[0].done()
        engine = vllm_engine_pb2_grpc.VllmEngineStub(system.channel(1))
        await engine.Abort(vllm_engine_pb2.AbortRequest(request_ids=["same"]), metadata=mine)
        assert (await running[0]).finished.reason == inference_pb2.FINISH_REASON_CANCELLED


async def test_http_needs_a_key_for_the_api_and_none_for_probes(keys: Keys) -> None:
    async with gateway(api_keys=keys.path) as system, openai_client(system) as client, http_client(system) as http:
        with pytest.raises(openai.AuthenticationError, match="not known") as refusal:
            await client.models.list()
        assert refusal.value.code == "invalid_api_key"
        assert refusal.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(model=MODEL, prompt="a")
        response = await http.post("/v1/chat/completions", content=b"x" * 100)
        assert response.status_code == 401  # before the body is looked at
        known = client.with_options(api_key=keys.free[0])
        assert (await known.completions.create(model=MODEL, prompt="a", max_tokens=2)).choices[0].text
        assert [model.id for model in (await known.models.list()).data] == [MODEL]
        for path in ("/health", "/ready", "/metrics"):
            assert (await http.get(path)).status_code == 200
        assert (await scrape(http)).value("blink_requests_rejected_total", reason="unauthenticated") == 3


async def test_limits_hold_over_both_protocols_together(keys: Keys) -> None:
    behaviour = Behaviour(tokens_per_second=20)
    async with gateway(behaviour, api_keys=keys.path) as system, openai_client(system) as client:
        mine = client.with_options(api_key=keys.one[0])
        stream = await mine.completions.create(model=MODEL, prompt="a", stream=True)
        refused = await generate(system, keys.one[0], text_request())
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 requests of one are under way" in refused.details
        with pytest.raises(openai.RateLimitError) as refusal:
            await mine.completions.create(model=MODEL, prompt="a")
        assert refusal.value.code == "concurrency_limit"
        assert (await generate(system, keys.free[0], text_request(stop=max_tokens(1)))).ids
        await stream.close()
        await until(lambda: system.session.free_slots == 8)
        again = await mine.completions.create(model=MODEL, prompt="a", max_tokens=1)
        assert again.choices[0].finish_reason == "length"
        load = await system.control().GetLoad(
            control_pb2.GetLoadRequest(), metadata=(("authorization", f"Bearer {keys.free[0]}"),)
        )
        assert load.overload.concurrency_limit == 2


async def test_a_rate_that_is_used_up_says_when_to_come_again(keys: Keys) -> None:
    async with gateway(api_keys=keys.path) as system, openai_client(system) as client:
        assert (await generate(system, keys.rare[0], text_request(stop=max_tokens(1)))).ids
        with pytest.raises(openai.RateLimitError) as refusal:
            await client.with_options(api_key=keys.rare[0]).completions.create(model=MODEL, prompt="a", max_tokens=1)
        assert refusal.value.code == "rate_limit"
        assert 1 < int(refusal.value.response.headers["retry-after"]) <= 30


async def test_tokens_of_prompts_and_outputs_use_up_a_rate_and_headers_tell_it(keys: Keys) -> None:
    async with gateway(api_keys=keys.path) as system, openai_client(system) as client:
        mine = client.with_options(api_key=keys.few[0])
        first = await mine.completions.with_raw_response.create(model=MODEL, prompt="abc", max_tokens=30)
        assert first.headers["x-ratelimit-limit-tokens"] == "60"
        assert int(first.headers["x-ratelimit-remaining-requests"]) == 1  # of two
        with pytest.raises(openai.RateLimitError, match="few may use 60 tokens a minute") as refusal:
            await mine.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=1, stream=True
            )
        headers = refusal.value.response.headers
        assert refusal.value.code == "token_rate_limit"
        assert headers["x-ratelimit-remaining-tokens"] == "0"
        # 3 + 30 tokens, of which ten may come at once: 24 s until one may come, 33 until all of them
        assert 20 < float(headers["retry-after-ms"]) / 1000 <= 24
        assert 29 < float(headers["x-ratelimit-reset-tokens"].removesuffix("s")) <= 33
        refused = await generate(system, keys.few[0], text_request())
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        free = await client.with_options(api_key=keys.free[0]).completions.with_raw_response.create(
            model=MODEL, prompt="a", max_tokens=1
        )
        assert [name for name in free.headers if name.startswith("x-ratelimit")] == []
        load = await system.control().GetLoad(
            control_pb2.GetLoadRequest(), metadata=(("authorization", f"Bearer {keys.free[0]}"),)
        )
        assert load.overload.token_rate_limit == 2


async def test_no_log_shows_a_key_or_a_prompt_and_metadata_makes_no_peer(keys: Keys) -> None:
    async with (
        gateway(workers=0) as system,
        worker_process(system, f"--api-keys={keys.path}", "--log-level=debug") as worker,
    ):
        address = f"http://127.0.0.1:{worker.http_port}/v1"
        async with openai.AsyncOpenAI(api_key=keys.free[0], base_url=address, max_retries=0) as client:
            await client.completions.create(model=MODEL, prompt=SECRET, max_tokens=2)
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model=MODEL, prompt=SECRET, max_tokens=2047)
            wrong = client.with_options(api_key="bk-wrong-key")
            with pytest.raises(openai.AuthenticationError):
                await wrong.completions.create(model=MODEL, prompt=SECRET)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
            forged = inference_pb2_grpc.InferenceStub(channel).Abort(
                inference_pb2.AbortRequest(request_id="x"), metadata=(("blink-forwarded-for", "free"),)
            )
            assert await forged.code() is grpc.StatusCode.UNAUTHENTICATED
        worker.process.terminate()
        assert await worker.end() == 0
    log = json.dumps(worker.log)
    assert "request_invalid" in log
    assert '"caller": "free"' in log
    for secret in (SECRET, keys.free[0], keys.free[1], "bk-wrong-key"):
        assert secret not in log
