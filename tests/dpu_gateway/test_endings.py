"""How streams end before the model is done: disconnect, deadline, abort, time limit, slow clients."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import numpy as np
import pytest
from blink.v1 import inference_pb2 as pb
from blink.v1 import inference_pb2_grpc
from google.protobuf.duration_pb2 import Duration

from services.dpu_gateway.errors import Overload, UnavailableError
from services.dpu_gateway.streams import RequestName
from services.dpu_gateway.tokenizer import PromptEncoder
from services.ring.schema import FinishReason
from tests.dpu_gateway.harness import Gateway, collect, gateway, max_tokens, ring_info, text_request, until
from tests.support.stand_in_engine import Behaviour


def live(system: Gateway) -> int:
    """Requests in the engine."""
    return sum(int(np.count_nonzero(lane.live)) for lane in system.engine.lanes)


def finished(system: Gateway, reason: FinishReason) -> int:
    return sum(int(lane.finished[reason]) for lane in system.engine.lanes)


async def settled(system: Gateway) -> None:
    """Every slot and the whole arena came back."""
    await until(lambda: system.session.free_slots == system.session.geometry.slots_per_lane)
    await until(lambda: system.session.free_arena_bytes == system.session.geometry.arena_bytes)
    assert live(system) == 0


async def test_a_client_that_disconnects_is_cancelled_in_the_engine() -> None:
    async with gateway(Behaviour(tokens_per_second=20)) as system:
        call = system.inference().Generate(text_request())
        await call.read()
        assert live(system) == 1
        call.cancel()
        await settled(system)
        assert finished(system, FinishReason.CANCELLED) == 1


async def test_a_lost_connection_cancels_all_its_streams() -> None:
    async with gateway(Behaviour(tokens_per_second=20)) as system:
        calls = [system.inference().Generate(text_request()) for _ in range(4)]
        for call in calls:
            await call.read()
        await system.channel().close()
        await settled(system)
        assert finished(system, FinishReason.CANCELLED) == 4


async def test_a_deadline_ends_the_stream_and_becomes_a_cancel_in_the_engine() -> None:
    async with gateway(Behaviour(tokens_per_second=20)) as system:
        result = await collect(system.inference().Generate(text_request(), timeout=0.3))
        assert result.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await settled(system)
        assert finished(system, FinishReason.CANCELLED) == 1


async def test_a_slot_is_not_reused_before_the_engine_said_finish() -> None:
    async with gateway(Behaviour(tokens_per_second=20), ring_info(slots_per_lane=1)) as system:
        call = system.inference().Generate(text_request())
        await call.read()
        system.behaviour.heartbeat_frozen = True  # the engine sees no cancel
        call.cancel()
        await asyncio.sleep(0.1)
        result = await collect(system.inference().Generate(text_request(stop=max_tokens(1))))
        assert result.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        system.behaviour.heartbeat_frozen = False
        await settled(system)
        assert (await collect(system.inference().Generate(text_request(stop=max_tokens(1))))).ids


async def test_a_client_gone_while_its_prompt_is_tokenized_leaves_nothing_behind() -> None:
    async with gateway() as system:
        for _ in range(20):
            call = system.inference().Generate(text_request("a b c " * 500))
            await asyncio.sleep(0.001)
            call.cancel()
        await settled(system)


async def test_abort_finishes_the_stream_as_cancelled_with_what_was_generated() -> None:
    async with gateway(Behaviour(tokens_per_second=200)) as system:
        call = system.inference().Generate(text_request(request_id="x"))
        reading = asyncio.create_task(collect(call))
        await until(lambda: live(system) == 1)
        assert (await system.inference().Abort(pb.AbortRequest(request_id="x"))).found
        result = await reading
        assert result.code is grpc.StatusCode.OK
        assert result.finished.reason == pb.FINISH_REASON_CANCELLED
        assert result.finished.usage.completion_tokens == len(result.ids)
        await settled(system)


async def test_abort_of_a_request_whose_prompt_is_still_tokenized_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(Behaviour(tokens_per_second=20)) as system:
        began, go_on = asyncio.Event(), asyncio.Event()

        async def slow_encode(_encoder: PromptEncoder, _text: str) -> list[int]:
            began.set()
            await go_on.wait()
            return [1, 2, 3]

        monkeypatch.setattr(PromptEncoder, "encode_text", slow_encode)
        reading = asyncio.create_task(collect(system.inference().Generate(text_request(request_id="early"))))
        await began.wait()
        assert (await system.inference().Abort(pb.AbortRequest(request_id="early"))).found
        go_on.set()
        result = await reading
        assert result.finished.reason == pb.FINISH_REASON_CANCELLED
        await settled(system)


async def test_abort_is_idempotent() -> None:
    async with gateway() as system:
        assert not (await system.inference().Abort(pb.AbortRequest(request_id="never seen"))).found
        await collect(system.inference().Generate(text_request(request_id="done", stop=max_tokens(1))))
        for _ in range(2):
            assert not (await system.inference().Abort(pb.AbortRequest(request_id="done"))).found


async def test_abort_reaches_the_worker_that_has_the_request() -> None:
    async with gateway(Behaviour(tokens_per_second=20), workers=2) as system:
        reading = asyncio.create_task(collect(system.inference(0).Generate(text_request(request_id="elsewhere"))))
        await until(lambda: live(system) == 1)
        assert (await system.inference(1).Abort(pb.AbortRequest(request_id="elsewhere"))).found
        assert (await reading).finished.reason == pb.FINISH_REASON_CANCELLED
        assert not (await system.inference(1).Abort(pb.AbortRequest(request_id="elsewhere"))).found


async def test_abort_ends_every_request_of_that_id_whichever_worker_has_it() -> None:
    async with gateway(Behaviour(tokens_per_second=20), workers=2) as system:
        reading = [
            asyncio.create_task(collect(system.inference(worker).Generate(text_request(request_id="twice"))))
            for worker in range(2)
        ]
        await until(lambda: live(system) == 2)
        assert (await system.inference(0).Abort(pb.AbortRequest(request_id="twice"))).found
        for result in await asyncio.gather(*reading):
            assert result.finished.reason == pb.FINISH_REASON_CANCELLED


async def test_a_dead_peers_socket_does_not_make_abort_fail() -> None:
    async with gateway() as system:
        (system.directory / "gateway-default-9.sock").touch()
        assert not (await system.inference().Abort(pb.AbortRequest(request_id="x"))).found


async def test_the_engines_time_limit_is_a_finish_reason_of_its_own() -> None:
    async with gateway(Behaviour(tokens_per_second=20)) as system:
        request = text_request(time_limit=Duration(nanos=200_000_000))
        result = await collect(system.inference().Generate(request))
        assert result.finished.reason == pb.FINISH_REASON_TIME_LIMIT
        await settled(system)


async def test_a_client_that_reads_too_slowly_is_ended_and_harms_nobody() -> None:
    """Its logprobs fill every buffer on the way, then the gateway's own bound ends it."""
    info = ring_info(arena_bytes=1 << 20, log_entries=8192)
    async with gateway(Behaviour(), info, max_unsent_entries=2000) as system:
        slow = system.inference().Generate(text_request(logprobs=20))
        await until(lambda: finished(system, FinishReason.CANCELLED) == 1)
        other = await collect(system.inference().Generate(text_request(stop=max_tokens(100))))
        assert len(other.ids) == 100
        result = await collect(slow)
        assert result.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "read too slowly" in result.details
        await settled(system)


@pytest.mark.parametrize(
    ("settings", "tokens", "words"),
    [({"max_unsent_entries": 2000}, 1500, "read too slowly"), ({"write_limit": 0.3}, 400, "not read for 0.3 s")],
)
async def test_a_client_that_never_reads_ends_with_a_status_behind_what_it_was_sent(
    settings: dict[str, Any], tokens: int, words: str
) -> None:
    """Its connection lives, so no keepalive ends it: in one case the engine goes on, in the other it is done."""
    info = ring_info(arena_bytes=1 << 20, log_entries=1 << 16)
    async with gateway(Behaviour(), info, **settings) as system:
        small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
        async with grpc.aio.insecure_channel(
            f"unix:{system.directory / 'api-0.sock'}", options=[*small_window, ("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                text_request(logprobs=20, stop=max_tokens(tokens, ignore_eos=True))
            )
            await until(lambda: system.workers[0].generations.overloads[Overload.SLOW_READER] == 1)
            await until(lambda: system.workers[0].generations.open_streams == 0)
            result = await collect(call)
        assert result.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert words in result.details
        assert not any(event.HasField("finished") for event in result.events)
        await settled(system)


async def test_tokens_that_came_while_the_worker_was_busy_share_a_chunk() -> None:
    async with gateway(Behaviour(burst=1)) as system:
        reading = asyncio.create_task(collect(system.inference().Generate(text_request(stop=max_tokens(500)))))
        await until(lambda: live(system) == 1)
        time.sleep(0.2)  # noqa: ASYNC251 - the whole event loop stands still, the engine goes on
        result = await reading
        assert len(result.ids) == 500
        assert len(result.events) < 250


async def test_random_cancels_give_every_slot_and_all_of_the_arena_back() -> None:
    numbers = np.random.default_rng(3)
    async with gateway(Behaviour(tokens_per_second=500), ring_info(slots_per_lane=16)) as system:

        async def one() -> str:
            ids = pb.TokenIds(ids=numbers.integers(0, 600, numbers.integers(1, 200)).tolist())
            count = int(numbers.integers(1, 60))
            call = system.inference().Generate(pb.GenerateRequest(token_ids=ids, stop=max_tokens(count)))
            if numbers.random() < 0.33:
                await asyncio.sleep(numbers.random() * 0.1)
                call.cancel()
                return "cancelled"
            result = await collect(call)
            if result.code is grpc.StatusCode.OK:
                assert result.ids == np.resize(ids.ids, count).tolist()
            return result.code.name

        outcomes = [outcome for _ in range(10) for outcome in await asyncio.gather(*(one() for _ in range(24)))]
        assert set(outcomes) <= {"OK", "cancelled", "RESOURCE_EXHAUSTED"}
        assert outcomes.count("OK") > 50
        await settled(system)


async def test_an_abort_of_what_was_never_submitted_does_not_end_a_later_request_of_that_id() -> None:
    async with gateway() as system:
        mine = RequestName("", "mine")
        claim = system.session.claim(mine)
        assert system.session.abort(mine)
        system.session.leave(claim, UnavailableError("gone", 0))
        result = await collect(system.inference().Generate(text_request(request_id="mine", stop=max_tokens(5))))
        assert (result.finished.reason, len(result.ids)) == (pb.FINISH_REASON_LENGTH, 5)
