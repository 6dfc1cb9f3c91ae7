from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import openai
import pytest
from blink.v1 import inference_pb2

from services.ring.schema import Command
from tests.dpu_gateway.harness import MODEL, collect, gateway, max_tokens, ring_info, text_request, until
from tests.dpu_gateway.http.clients import http_client, openai_client
from tests.support.stand_in_engine import Behaviour

HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def error(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The error object; every one has the same four keys."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (TEXT, {"temperature": -1}, "temperature", "is -1, must be in [0, 100]"),
        (TEXT, {"temperature": "hot"}, "temperature", "should be a valid number, not 'hot'"),
        (TEXT, {"max_tokens": 0}, "max_tokens", "is 0, must be 1 to 2047"),
        (TEXT, {"max_tokens": 10**30}, "max_tokens", "4294967295"),
        (TEXT, {"max_tokens": 2047}, "max_tokens", "the context 2048"),
        (TEXT, {"max_tokens": 3, "min_tokens": 4}, "min_tokens", "is 4"),
        (TEXT, {"prompt": ""}, "prompt", "empty"),
        (TEXT, {"prompt": []}, "prompt", "empty"),
        (TEXT, {"prompt": [5, 640]}, "prompt[1]", "is 640, must be below 640"),
        (TEXT, {"prompt": {"a": 1}}, "prompt", "valid"),
        (TEXT, {"prompt": None}, "prompt", "valid"),
        (TEXT, {"stop": ["x"] * 17}, "stop", "has 17 strings, at most 16"),
        (TEXT, {"stop": [""]}, "stop[0]", "has 0 characters"),
        (TEXT, {"stop_token_ids": [640]}, "stop_token_ids[0]", "is 640"),
        (TEXT, {"logprobs": 21}, "logprobs", "is 21, must be 0 to 20"),
        (TEXT, {"logprobs": 1, "echo": True}, "logprobs", "echo with logprobs is not supported"),
        (TEXT, {"n": 0}, "n", "greater than or equal to 1"),
        (TEXT, {"n": 100, "prompt": ["a", "b"]}, "n", "over 128"),
        (TEXT, {"best_of": 2}, "best_of", "not supported"),
        (TEXT, {"suffix": "x"}, "suffix", "not supported"),
        (TEXT, {"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        (TEXT, {"colour": 1}, "colour", "not a parameter"),
        (TEXT, {"priority": 9}, "priority", "is 9, must be -4 to 4"),
        (CHAT, {"messages": []}, "messages", "empty"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        (CHAT, {"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "empty"),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, "messages[0].content", "empty"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", ""),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "not supported"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "logprobs", "is 21"),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "both"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_the_name_of_its_parameter(
    path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    prompt = {"messages": HI} if path == CHAT else {"prompt": "abc"}
    async with gateway() as system, http_client(system) as client:
        found = error(await client.post(path, json={"model": MODEL, **prompt, **fields}), 400)
        assert found["type"] == "invalid_request_error"
        assert str(found["param"]).startswith(param), found
        assert words in found["message"], found
        assert system.workers[0].generations.open_streams == 0
        assert system.session.free_slots == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {}, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False},
        {"logit_bias": None, "tools": None, "user": "me", "metadata": {"a": "b"}, "service_tier": "auto"},
    ],
)
async def test_values_that_ask_for_nothing_are_no_reason_to_refuse(fields: dict[str, Any]) -> None:
    async with gateway() as system, http_client(system) as client:
        body = {"model": MODEL, "messages": HI, "max_tokens": 1, **fields}
        assert (await client.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("content", "headers", "status", "words"),
    [
        (b"{", {}, 400, "not valid JSON"),
        (b"[]", {}, 400, "not a JSON object"),
        (b'{"model": "small", "prompt": "a", "temperature": NaN}', {}, 400, "not valid JSON"),
        (b"[" * 4000, {}, 400, "not valid JSON"),
        (b"\xff\xfe", {}, 400, "not valid JSON"),
        (b"{}", {"content-type": "text/plain"}, 415, "application/json"),
        (b"{}", {"content-type": ""}, 415, "application/json"),
        (b'{"model": "small", "prompt": "a"}', {"x-request-id": "a b"}, 400, "x-request-id"),
        (b" " * 5000, {}, 413, "at most 4096"),
    ],
)
async def test_bodies_that_are_no_request_are_refused(
    content: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    async with gateway(max_message_bytes=4096) as system, http_client(system) as client:
        sent = {"content-type": "application/json", **headers}
        assert words in error(await client.post(TEXT, content=content, headers=sent), status)["message"]


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit() -> None:
    async with gateway(max_message_bytes=4096) as system, http_client(system) as client:

        async def parts() -> Any:
            for _ in range(10):
                yield b" " * 1000

        response = await client.post(TEXT, content=parts(), headers={"content-type": "application/json"})
        assert "more than 4096" in error(response, 413)["message"]


async def test_unknown_models_paths_and_methods_are_named() -> None:
    async with gateway() as system, http_client(system) as client:
        found = error(await client.post(TEXT, json={"model": "gpt-9", "prompt": "a"}), 404)
        assert (found["code"], found["param"]) == ("model_not_found", "model")
        assert "'gpt-9' is not served here; 'small' is" in found["message"]
        assert "/v1/embeddings" in error(await client.post("/v1/embeddings", json={}), 404)["message"]
        assert "GET" in error(await client.get(TEXT), 405)["message"]
        assert error(await client.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"


async def test_a_full_gateway_is_429_that_says_when_to_retry() -> None:
    behaviour = Behaviour(tokens_per_second=20)
    async with (
        gateway(behaviour, ring_info(slots_per_lane=1), retry_after=1.5) as system,
        http_client(system) as client,
    ):
        running = asyncio.create_task(collect(system.inference().Generate(text_request())))
        await until(lambda: bool(system.engine.lanes[0].live.any()))
        response = await client.post(TEXT, json={"model": MODEL, "prompt": "a"})
        found = error(response, 429)
        assert (found["type"], found["code"]) == ("rate_limit_error", "no_slot")
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("2", "1500")
        running.cancel()


async def test_n_choices_are_all_refused_before_a_stream_begins_when_one_finds_no_slot() -> None:
    behaviour = Behaviour(tokens_per_second=20)
    async with gateway(behaviour, ring_info(slots_per_lane=2)) as system:
        running = asyncio.create_task(collect(system.inference().Generate(text_request())))
        await until(lambda: bool(system.engine.lanes[0].live.any()))
        async with openai_client(system) as client:
            with pytest.raises(openai.RateLimitError, match="all 2 slots are in use"):
                await client.completions.create(model=MODEL, prompt="a", n=2, stream=True)
        running.cancel()
        await until(lambda: not system.engine.lanes[0].live.any() and system.session.free_slots == 2)


@pytest.mark.parametrize(
    ("path", "fields"),
    [(TEXT, {"prompt": "a", "n": 3}), (TEXT, {"prompt": ["a", "b", "c"]}), (CHAT, {"messages": HI, "n": 3})],
)
async def test_more_choices_than_there_are_slots_are_not_to_be_retried(path: str, fields: dict[str, Any]) -> None:
    async with gateway(Behaviour(), ring_info(slots_per_lane=2)) as system, http_client(system) as client:
        response = await client.post(path, json={"model": MODEL, **fields})
        found = error(response, 400)
        assert found["param"] == "n"
        assert "is 3, but this gateway has 2 slots" in found["message"]
        assert "retry-after" not in response.headers


async def test_an_engine_that_drains_is_503_and_one_that_dies_ends_the_stream_with_an_error() -> None:
    async with gateway(Behaviour(tokens_per_second=50)) as system, openai_client(system) as client:
        stream = await client.completions.create(model=MODEL, prompt="abc", stream=True)
        assert (await anext(aiter(stream))).choices
        await system.kill_engine()
        with pytest.raises(openai.APIError, match="heartbeat stopped"):
            async for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match="heartbeat stopped") as failure:
            await client.completions.create(model=MODEL, prompt="abc")
        assert failure.value.status_code == 503
        assert failure.value.response.headers["retry-after"] == "1"


async def test_an_engine_that_shuts_down_is_503() -> None:
    async with gateway() as system, http_client(system) as client:
        system.order(Command.DRAIN)
        await until(lambda: system.engine.state.name == "DRAINING")
        response = await client.post(TEXT, json={"model": MODEL, "prompt": "abc"})
        assert "shutting down" in error(response, 503)["message"]


async def test_an_id_in_use_is_refused_and_aborting_it_by_grpc_ends_the_answer() -> None:
    async with gateway(Behaviour(tokens_per_second=20)) as system, openai_client(system) as client:
        headers = {"x-request-id": "twice"}
        first = asyncio.create_task(client.completions.create(model=MODEL, prompt="a", extra_headers=headers))
        await until(lambda: bool(system.engine.lanes[0].live.any()))
        with pytest.raises(openai.BadRequestError, match="request_id 'twice' is in use"):
            await client.completions.create(model=MODEL, prompt="a", extra_headers=headers)
        assert (await system.inference().Abort(inference_pb2.AbortRequest(request_id="twice"))).found
        assert str((await first).choices[0].finish_reason) == "abort"


async def test_grpc_and_http_share_slots() -> None:
    async with gateway(Behaviour(tokens_per_second=20)) as system, openai_client(system) as client:
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        assert system.session.free_slots == 7
        assert len((await collect(system.inference().Generate(text_request(stop=max_tokens(2))))).ids) == 2
        await stream.close()
        await until(lambda: system.session.free_slots == 8)
