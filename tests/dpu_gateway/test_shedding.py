"""Under overload the waiting request of the lowest priority gives way, the newest first, and never one that runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import openai
import pytest
from blink.v1 import control_pb2, inference_pb2
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from services.ring.schema import FinishReason
from tests.dpu_gateway.harness import (
    MODEL,
    Gateway,
    Result,
    collect,
    gateway,
    max_tokens,
    ring_info,
    text_request,
    until,
)
from tests.dpu_gateway.http.clients import http_client, openai_client
from tests.dpu_gateway.metrics.scraped import scrape
from tests.support.stand_in_engine import Behaviour

SLOTS = 8
SLOW = 20.0  # tokens a second


def one_runs() -> Behaviour:
    return Behaviour(max_running=1, tokens_per_second=SLOW)


class Load:
    """Requests by name, in the order in which they were sent."""

    def __init__(self, system: Gateway) -> None:
        self.system = system
        self.running: dict[str, asyncio.Task[Result]] = {}

    async def send(self, name: str, priority: int, tokens: int = 40) -> None:
        """One that is queued or refused when this returns, unless the engine stands still."""
        request = text_request(request_id=name, priority=priority, stop=max_tokens(tokens))
        call = self.system.inference().Generate(request)
        self.running[name] = asyncio.create_task(collect(call))
        if not self.system.behaviour.heartbeat_frozen:
            await asyncio.wait([asyncio.ensure_future(call.initial_metadata())], timeout=10)

    async def fill(self, priorities: list[int]) -> None:
        """The first of which runs, the others wait."""
        for index, priority in enumerate(priorities):
            await self.send(f"{index}", priority)
            live = index + 1
            await until(lambda: int(self.system.engine.lanes[0].live.sum()) == live)  # noqa: B023 (awaited at once)

    def ended(self) -> set[str]:
        return {name for name, task in self.running.items() if task.done()}

    async def stop(self) -> None:
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        await until(lambda: self.system.session.free_slots == SLOTS)
        assert self.system.session.free_arena_bytes == self.system.session.geometry.arena_bytes
        assert not self.system.engine.lanes[0].live.any()


async def test_a_higher_priority_takes_the_slot_of_the_lowest_newest_waiting_one() -> None:
    async with gateway(one_runs()) as system:
        load = Load(system)
        await load.fill([-4, -1, 0, -2, -2, 0, 0, -1])  # 0 runs: its priority saves nobody else
        await load.send("high", 3)
        await until(lambda: load.ended() == {"4"})
        shed = await load.running["4"]
        assert shed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "gave way to one of higher priority" in shed.details
        assert shed.error is not None
        status = rpc_status.from_call(shed.error)  # type: ignore[arg-type]  # it reads what both kinds of calls have
        retry = error_details_pb2.RetryInfo()
        assert status is not None
        assert status.details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == 500
        await load.send("next", 1)
        await until(lambda: load.ended() == {"4", "3"})
        await until(lambda: int(system.engine.lanes[0].live.sum()) == SLOTS)
        await load.stop()


async def test_equal_and_lower_priorities_are_refused_and_shed_nobody() -> None:
    async with gateway(one_runs()) as system:
        load = Load(system)
        await load.fill([0] * SLOTS)
        for priority in (0, -1, -4):
            await load.send(f"late{priority}", priority)
        refused = {f"late{priority}" for priority in (0, -1, -4)}
        await until(lambda: load.ended() == refused)
        assert {(await load.running[name]).code for name in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        await load.stop()


async def test_what_runs_is_never_shed() -> None:
    async with gateway(Behaviour(tokens_per_second=SLOW)) as system:
        load = Load(system)
        await load.fill([-4] * SLOTS)
        await load.send("high", 4)
        assert "all 8 slots are in use" in (await load.running["high"]).details
        await load.stop()


async def test_a_full_queue_of_the_engine_sheds_too() -> None:
    async with gateway(Behaviour(max_running=1, max_requests=4, tokens_per_second=SLOW)) as system:
        load = Load(system)
        await load.fill([0, -1, 0, -1])
        await load.send("high", 1)
        await until(lambda: load.ended() == {"3"})
        await until(lambda: int(system.engine.lanes[0].live.sum()) == 4)
        await load.send("low", -1)
        assert "queue is full" in (await load.running["low"]).details
        assert load.ended() == {"3", "low"}
        assert int(system.engine.lanes[0].finished[FinishReason.QUEUE_FULL]) == 2
        await load.stop()


@asynccontextmanager
async def standing_with_a_full_queue() -> AsyncIterator[tuple[Gateway, Load]]:
    """Four requests, the last of them of low priority, a fifth that is in the lane, and an engine that stands still
    until the test lets it step or go on."""
    behaviour = Behaviour(max_running=1, max_requests=4, tokens_per_second=SLOW)
    async with gateway(behaviour, heartbeat_timeout=60) as system:
        load = Load(system)
        await load.fill([0, 0, 0, -1])
        system.engine.die()
        free = system.session.free_arena_bytes
        request = text_request(request_id="high", priority=1, stop=max_tokens(40))
        load.running["high"] = asyncio.create_task(collect(system.inference().Generate(request)))
        await until(lambda: system.session.free_arena_bytes < free)  # it is in the lane
        yield system, load
        await load.stop()


async def abort(system: Gateway, name: str) -> bool:
    return (await system.inference().Abort(inference_pb2.AbortRequest(request_id=name))).found


async def ends_as_aborted(load: Load) -> None:
    """The request that found the queue full, once the engine goes on."""
    load.system.engine.start()
    result = await load.running["high"]
    assert result.finished.reason == inference_pb2.FINISH_REASON_CANCELLED, result.details
    assert not result.ids
    assert not await abort(load.system, "high")


async def test_an_abort_before_a_full_queue_refuses_ends_the_request_and_sheds_nobody() -> None:
    async with standing_with_a_full_queue() as (system, load):
        assert await abort(system, "high")
        await ends_as_aborted(load)
        assert load.ended() == {"high"}


@pytest.mark.parametrize("room", [4, 3], ids=["that finds room", "that finds none"])
async def test_an_abort_while_room_is_made_ends_the_request_at_its_second_try(room: int) -> None:
    async with standing_with_a_full_queue() as (system, load):
        assert system.engine.step()
        await until(lambda: load.ended() == {"3"})
        twin = await collect(system.inference().Generate(text_request(request_id="high")))
        assert "'high' is in use" in twin.details
        assert await abort(system, "high")
        system.behaviour.max_requests = room
        await ends_as_aborted(load)
        assert load.ended() == {"3", "high"}


async def test_a_full_arena_sheds_as_many_as_are_needed_and_nobody_in_vain() -> None:
    async with gateway(one_runs(), ring_info(arena_bytes=1 << 14)) as system:
        load = Load(system)
        await load.fill([0])  # runs
        for name in ("a", "b", "c"):
            await load.send(name, -1, tokens=900)  # 4 KiB each
        await until(lambda: int(system.engine.lanes[0].live.sum()) == 4)
        await load.send("huge", 2, tokens=2040)  # room for two of them
        await until(lambda: load.ended() == {"b", "c"})
        await until(lambda: int(system.engine.lanes[0].live.sum()) == 3)
        await load.send("in vain", 1, tokens=2040)  # only a could go, and that would not do
        assert "arena is full" in (await load.running["in vain"]).details
        assert load.ended() == {"b", "c", "in vain"}
        await load.stop()


async def test_one_that_gives_up_while_room_is_made_leaves_nothing_behind() -> None:
    behaviour = one_runs()
    async with gateway(behaviour, heartbeat_timeout=60) as system:
        load = Load(system)
        await load.fill([0] * SLOTS)
        behaviour.heartbeat_frozen = True  # nothing ends while the engine stands
        await load.send("high", 1)
        await until(lambda: len(load.ended()) == 1)  # it was told to
        load.running["high"].cancel()
        await asyncio.sleep(0)
        behaviour.heartbeat_frozen = False
        await until(lambda: system.session.free_slots == 1)
        await load.send("later", 0)
        await until(lambda: system.session.free_slots == 0)
        await load.stop()


async def test_a_lost_engine_ends_who_waits_for_room() -> None:
    behaviour = one_runs()
    async with gateway(behaviour, heartbeat_timeout=0.3) as system:
        load = Load(system)
        await load.fill([0] * SLOTS)
        behaviour.heartbeat_frozen = True
        await load.send("high", 1)
        assert (await load.running["high"]).code is grpc.StatusCode.UNAVAILABLE
        behaviour.heartbeat_frozen = False
        for task in load.running.values():
            await task


async def test_many_newcomers_each_get_the_slot_that_was_freed_for_them() -> None:
    async with gateway(one_runs()) as system:
        load = Load(system)
        await load.fill([0] * SLOTS)
        await asyncio.gather(*(load.send(f"high{index}", 1) for index in range(SLOTS - 1)))
        await until(lambda: load.ended() == {f"{index}" for index in range(1, SLOTS)})
        await until(lambda: int(system.engine.lanes[0].live.sum()) == SLOTS)
        await load.send("one too many", 1)
        assert (await load.running["one too many"]).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not any(name.startswith("high") for name in load.ended())
        await load.stop()


async def test_http_clients_are_told_to_come_again_and_figures_count_it() -> None:
    async with gateway(one_runs()) as system, openai_client(system) as client, http_client(system) as http:
        load = Load(system)
        await load.fill([0])

        async def ask() -> None:
            await client.completions.create(model=MODEL, prompt="a", max_tokens=40, extra_body={"priority": -2})

        whole = [asyncio.create_task(ask()) for _ in range(SLOTS - 1)]
        await until(lambda: int(system.engine.lanes[0].live.sum()) == SLOTS)
        await load.send("high", 0)
        await until(lambda: any(task.done() for task in whole))
        (shed,) = (task for task in whole if task.done())
        with pytest.raises(openai.RateLimitError) as refusal:
            await shed
        assert refusal.value.code == "shed"
        assert refusal.value.response.headers["retry-after-ms"] == "500"
        answer = await system.control().GetLoad(control_pb2.GetLoadRequest())
        assert answer.overload.shed == 1
        assert answer.overload.no_slot == 0
        figures = await scrape(http)
        ended = figures.value("blink_request_success_total", model_name=MODEL, finished_reason="shed")
        assert ended + figures.value("blink_requests_rejected_total", reason="shed") == 1  # by whether it was queued
        for task in whole:
            task.cancel()
        await asyncio.gather(*whole, return_exceptions=True)
        await load.stop()
