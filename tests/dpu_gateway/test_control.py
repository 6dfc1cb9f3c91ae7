from __future__ import annotations

import asyncio

import grpc
import pytest
from blink.v1 import control_pb2 as pb
from grpc_reflection.v1alpha import reflection_pb2

from tests.dpu_gateway.harness import EOS, collect, gateway, max_tokens, model_card, ring_info, text_request, until
from tests.dpu_gateway.small_tokenizer import byte_level_tokenizer
from tests.support.stand_in_engine import FINGERPRINT, Behaviour


async def test_model_info_is_the_cards_and_the_rings() -> None:
    async with gateway() as system:
        info = await system.control().GetModelInfo(pb.GetModelInfoRequest())
    assert info == pb.GetModelInfoResponse(
        name="small",
        architecture="llama",
        fingerprint=FINGERPRINT.hex(),
        vocabulary_size=640,
        max_context_tokens=2048,
        has_chat_template=True,
        eos_token_ids=[byte_level_tokenizer().token_to_id(EOS) or 0],
    )
    async with gateway(card=model_card(chat_template="")) as system:
        assert not (await system.control().GetModelInfo(pb.GetModelInfoRequest())).has_chat_template


async def test_model_info_is_unavailable_until_the_first_engine() -> None:
    async with gateway() as system:
        await system.kill_engine()
        worker = await system.start_worker()
        assert worker.link.model is None
        with pytest.raises(grpc.aio.AioRpcError, match="no model is known yet"):
            await system.control(1).GetModelInfo(pb.GetModelInfoRequest())


async def test_load_shows_the_engine_and_each_lane() -> None:
    async with gateway(Behaviour(tokens_per_second=20), ring_info(slots_per_lane=4), workers=2) as system:
        calls = [system.inference(worker).Generate(text_request()) for worker in (0, 0, 1)]
        for call in calls:
            await call.read()
            await call.read()
        load = await system.control().GetLoad(pb.GetLoadRequest())
        assert load.engine_state == pb.ENGINE_STATE_READY
        assert load.engine_epoch == system.engine.epoch
        assert load.heartbeat_age_ms < 1000
        assert (load.running_requests, load.total_slots, load.free_slots) == (3, 8, 5)
        assert load.steps > 0
        assert load.generated_tokens >= 3
        assert [lane.lane for lane in load.lanes] == [0, 1]
        by_load = sorted((lane.running_requests, lane.attached) for lane in load.lanes)
        assert by_load == [(1, True), (2, True)]  # whichever worker came first has lane 0
        for call in calls:
            call.cancel()


async def test_the_services_are_listed_by_reflection() -> None:
    async with gateway() as system:
        call: grpc.aio.StreamStreamMultiCallable[
            reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse
        ]
        call = system.channel().stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        (response,) = [
            response async for response in call(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        ]
    names = {service.name for service in response.list_services_response.service}
    assert {"blink.v1.Inference", "blink.v1.Control", "grpc.health.v1.Health"} <= names


async def test_no_load_is_lost_between_streams() -> None:
    async with gateway() as system:
        await asyncio.gather(
            *(collect(system.inference().Generate(text_request(stop=max_tokens(5)))) for _ in range(8))
        )
        await until(lambda: system.session.free_slots == 8)
        load = await system.control().GetLoad(pb.GetLoadRequest())
        assert (load.generated_tokens, load.running_requests, load.free_slots) == (40, 0, 8)
