from __future__ import annotations

import asyncio
import math
import random

import grpc
import numpy as np
import pytest
from blink.v1 import control_pb2
from blink.v1 import inference_pb2 as pb
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from services.dpu_gateway.errors import STATUS_DETAILS_KEY
from services.ring.record import pack_record
from services.ring.schema import EngineState
from tests.dpu_gateway.harness import (
    Gateway,
    Result,
    collect,
    gateway,
    max_tokens,
    model_card,
    ring_info,
    text_request,
    until,
)
from tests.support.stand_in_engine import Behaviour


def details(result: Result) -> status_pb2.Status:
    assert result.error is not None
    metadata = dict(result.error.trailing_metadata())
    return status_pb2.Status.FromString(metadata[STATUS_DETAILS_KEY])


def bad_field(result: Result) -> str:
    """The field that google.rpc.BadRequest names."""
    assert result.code is grpc.StatusCode.INVALID_ARGUMENT, result
    bad = error_details_pb2.BadRequest()
    assert details(result).details[0].Unpack(bad)
    return str(bad.field_violations[0].field)


def retry_after(result: Result) -> float:
    info = error_details_pb2.RetryInfo()
    assert details(result).details[0].Unpack(info)
    return float(info.retry_delay.ToTimedelta().total_seconds())


async def generate(system: Gateway, request: pb.GenerateRequest) -> Result:
    return await collect(system.inference().Generate(request))


async def test_a_bad_field_is_named_in_the_status_and_in_its_details() -> None:
    async with gateway() as system:
        result = await generate(system, text_request(sampling=pb.SamplingParams(top_p=2)))
        assert bad_field(result) == "sampling.top_p"
        assert result.details == "sampling.top_p is 2, must be in (0, 1]"
        assert details(result).message == result.details


async def test_prompts_and_limits_over_the_context_are_refused() -> None:
    async with gateway() as system:
        long_ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 2048))
        assert bad_field(await generate(system, long_ids)) == "token_ids.ids"
        assert bad_field(await generate(system, text_request("word " * 2000))) == "text"
        assert bad_field(await generate(system, text_request("x" * 1_000_000))) == "text"
        result = await generate(system, text_request(stop=max_tokens(2045)))
        assert bad_field(result) == "stop.max_tokens"
        assert "at most 2044: the prompt has 4 tokens and the context 2048" in result.details
        assert (await generate(system, text_request(stop=max_tokens(2044)))).code is grpc.StatusCode.OK


async def test_text_without_tokens_or_with_invalid_utf8_is_refused() -> None:
    async with gateway() as system:
        assert bad_field(await generate(system, text_request(""))) == "text"
        raw: grpc.aio.UnaryStreamMultiCallable[bytes, pb.GenerateResponse]
        raw = system.channel().unary_stream(
            "/blink.v1.Inference/Generate", response_deserializer=pb.GenerateResponse.FromString
        )
        broken = text_request("~~~").SerializeToString().replace(b"~~~", b"\xed\xa0\x80")
        result = await collect(raw(broken))
        assert bad_field(result) == "text"
        assert result.details == "text is not valid UTF-8"
        result = await collect(raw(b"\xff\xff\xff"))
        assert result.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_abort_that_is_no_message_is_refused_too() -> None:
    async with gateway() as system:
        raw: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = system.channel().unary_unary("/blink.v1.Inference/Abort")
        with pytest.raises(grpc.aio.AioRpcError, match="request_id is not valid UTF-8"):
            await raw(b"\x0a\x01\xff")


async def test_chat_without_a_template_is_refused_while_text_works() -> None:
    async with gateway(card=model_card(chat_template="")) as system:
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
        result = await generate(system, pb.GenerateRequest(chat=chat))
        assert bad_field(result) == "chat"
        assert "no chat template" in result.details
        assert (await generate(system, text_request(stop=max_tokens(1)))).code is grpc.StatusCode.OK


async def test_a_chat_whose_last_message_is_empty_is_refused_as_empty_text_is() -> None:
    async with gateway() as system:
        messages = [pb.ChatMessage(role="assistant", content=""), pb.ChatMessage(role="user", content="hi")]
        chat = pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages), stop=max_tokens(1))
        assert (await generate(system, chat)).code is grpc.StatusCode.OK
        chat.chat.messages[-1].content = ""
        assert bad_field(await generate(system, chat)) == "chat.messages[1].content"


async def test_what_a_message_holds_is_refused_with_its_place_in_the_message() -> None:
    async with gateway(card=model_card(unencodable_bytes=b"\x04")) as system:
        messages = [pb.ChatMessage(role="system", content="fine"), pb.ChatMessage(role="user", content="a\x04b")]
        result = await generate(system, pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages)))
        assert bad_field(result) == "chat.messages[1].content"
        assert "has byte 0x04 at character 1," in result.details


async def test_an_unknown_model_is_not_found() -> None:
    async with gateway() as system:
        result = await generate(system, text_request(model="huge"))
        assert result.code is grpc.StatusCode.NOT_FOUND
        assert result.details == "model 'huge' is not served here; 'small' is"


async def test_a_message_over_the_size_limit_is_refused_and_the_connection_lives_on() -> None:
    async with gateway(max_message_bytes=4096) as system:
        result = await generate(system, text_request("x" * 5000))
        assert result.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await generate(system, text_request(stop=max_tokens(1)))).code is grpc.StatusCode.OK


async def test_a_request_id_in_use_is_refused() -> None:
    async with gateway(Behaviour(tokens_per_second=10)) as system:
        call = system.inference().Generate(text_request(request_id="twice"))
        await call.read()
        assert bad_field(await generate(system, text_request(request_id="twice"))) == "request_id"
        call.cancel()


async def test_with_every_slot_in_use_callers_are_refused_at_once_and_told_when_to_retry() -> None:
    async with gateway(Behaviour(tokens_per_second=1), ring_info(slots_per_lane=2), retry_after=1.5) as system:
        calls = [system.inference().Generate(text_request(stop=max_tokens(100))) for _ in range(2)]
        for call in calls:
            await call.read()
        result = await generate(system, text_request())
        assert result.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert result.details == "all 2 slots are in use"
        assert retry_after(result) == 1.5
        for call in calls:
            call.cancel()


async def test_every_overload_is_counted_by_its_cause() -> None:
    slow = Behaviour(tokens_per_second=1)
    full = ring_info(slots_per_lane=2, arena_bytes=4096)
    async with gateway(slow, full) as system:
        first = system.inference().Generate(text_request(stop=max_tokens(600)))
        await first.read()
        await generate(system, text_request(stop=max_tokens(600)))
        second = system.inference().Generate(text_request(stop=max_tokens(5)))
        await second.read()
        await asyncio.gather(*(generate(system, text_request(stop=max_tokens(5))) for _ in range(3)))
        load = await system.control().GetLoad(control_pb2.GetLoadRequest())
        assert load.overload == control_pb2.Overload(no_slot=3, arena_full=1)
        await system.kill_engine()
        await until(lambda: system.workers[0].link.session is None)
        load = await system.control().GetLoad(control_pb2.GetLoadRequest())
        assert load.overload.no_slot == 3  # the worker's own count, not the engine's
        first.cancel()
        second.cancel()
    async with gateway(Behaviour(max_requests=0)) as system:
        await generate(system, text_request())
        load = await system.control().GetLoad(control_pb2.GetLoadRequest())
        assert load.overload == control_pb2.Overload(queue_full=1)


async def test_a_full_engine_queue_is_answered_before_anything_was_accepted() -> None:
    async with gateway(Behaviour(tokens_per_second=1, max_requests=1)) as system:
        first = system.inference().Generate(text_request(stop=max_tokens(100)))
        await first.read()
        results = await asyncio.gather(*(generate(system, text_request()) for _ in range(20)))
        assert {result.code for result in results} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert not any(result.events for result in results)
        assert {retry_after(result) for result in results} == {0.5}
        first.cancel()


async def test_a_full_arena_is_overload_and_a_request_that_never_fits_is_invalid() -> None:
    info = ring_info(arena_bytes=4096)
    async with gateway(Behaviour(tokens_per_second=1), info) as system:
        first = system.inference().Generate(text_request(stop=max_tokens(600)))
        await first.read()
        result = await generate(system, text_request(stop=max_tokens(600)))
        assert result.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "arena is full" in result.details
        result = await generate(system, text_request(stop=max_tokens(1500)))
        assert bad_field(result) == "stop.max_tokens"
        assert "which has 4096" in result.details
        first.cancel()


async def test_a_rejection_by_the_engine_is_our_fault_and_names_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway() as system:
        with monkeypatch.context() as patch:
            patch.setattr(
                "services.dpu_gateway.record.pack_record", lambda _prompt, **fields: pack_record((), **fields)
            )
            result = await generate(system, text_request())
        assert result.code is grpc.StatusCode.INTERNAL
        assert result.details == "the engine rejected the request: EMPTY_PROMPT"
        assert (await generate(system, text_request(stop=max_tokens(1)))).code is grpc.StatusCode.OK


async def test_a_draining_engine_refuses_new_requests_as_unavailable() -> None:
    async with gateway() as system:
        system.engine.state = EngineState.DRAINING
        result = await generate(system, text_request())
        assert result.code is grpc.StatusCode.UNAVAILABLE
        assert retry_after(result) == 0.5


async def test_refused_requests_leave_no_slot_and_no_arena_behind() -> None:
    async with gateway(Behaviour(max_requests=0)) as system:
        for _ in range(30):
            assert (await generate(system, text_request())).code is grpc.StatusCode.RESOURCE_EXHAUSTED
            await generate(system, text_request(stop=max_tokens(2047)))
        assert system.session.free_slots == 8
        system.behaviour.max_requests = None
        calls = [generate(system, text_request(stop=max_tokens(500))) for _ in range(8)]
        assert {result.code for result in await asyncio.gather(*calls)} == {grpc.StatusCode.OK}


async def test_any_mix_of_values_ends_with_a_definite_status() -> None:
    numbers = random.Random(1)
    async with gateway() as system:
        for _ in range(150):
            ids = [numbers.randrange(700) for _ in range(numbers.randrange(4))]
            count = numbers.choice([0, 1, 17, 400, 2044, 2048, 2**32 - 1])
            sampling = pb.SamplingParams(
                temperature=numbers.choice([0, 1, -1, math.nan, math.inf, 100, 101]),
                top_p=numbers.choice([0, 0.5, 1, 1.5, math.nan]),
            )
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling, stop=max_tokens(count))
            result = await generate(system, request)
            if result.code is grpc.StatusCode.OK:
                assert result.ids == np.resize(ids, count).tolist()
            else:
                assert bad_field(result)


@pytest.mark.parametrize("char", ["x", "\x00", "é", "😀"])
async def test_a_refusal_that_quotes_the_caller_arrives_whatever_its_length(char: str) -> None:
    quoting = model_card(chat_template="{{ raise_exception(messages[0].content) }}")
    async with gateway(card=quoting) as system:
        result = await generate(system, text_request(model=char * 100_000))
        assert result.code is grpc.StatusCode.NOT_FOUND, result
        assert "is not served here; 'small' is" in result.details
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=char * 100_000)])
        assert bad_field(await generate(system, pb.GenerateRequest(chat=chat))) == "chat.messages"
