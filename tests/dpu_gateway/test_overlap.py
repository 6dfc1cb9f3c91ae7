"""Reads that take their time, as over RDMA: the event loop goes on, and a link that dies is a loss by name."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import grpc
import pytest
from blink.v1 import control_pb2

from services.ring.errors import TransportLostError
from services.ring.shm import ShmTransport
from services.ring.transport import PendingRead
from tests.dpu_gateway.harness import collect, gateway, max_tokens, ring_info, text_request, until
from tests.dpu_gateway.http.clients import http_client
from tests.dpu_gateway.metrics.scraped import scrape
from tests.dpu_gateway.test_refusals import retry_after
from tests.support.stand_in_engine import Behaviour

TURNS = 5  # of the event loop, until a read is done


class SlowTransport(ShmTransport):
    """Shared memory whose reads, once started, are done some turns later; ``cut`` makes them fail, ``silent`` leaves
    them under way and notes who waits for one without letting others run."""

    made: list[SlowTransport]
    busy = False
    silent_from: int | None = None  # which of a new one's reads is the first that does not come back

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.made.append(self)
        self.cut = self.silent = False
        self.waited = 0  # reads that held up the event loop while the link was silent
        self.turns = 0  # spent waiting
        self._under_way: deque[tuple[PendingRead, bytes]] = deque()
        self._left = self._started = 0

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def start_read(self, offset: int, length: int) -> PendingRead:
        self._started += 1
        self.silent |= self._started == self.silent_from
        pending = PendingRead()
        self._under_way.append((pending, super().read(offset, length)))
        self._left = TURNS
        return pending

    def read(self, offset: int, length: int) -> bytes:
        self.waited += self.silent
        return super().read(offset, length)

    def complete(self, reads: Iterable[PendingRead]) -> None:
        self.waited += self.silent
        super().complete(reads)

    def flush(self) -> None:
        self.waited += self.silent
        super().flush()

    def progress(self) -> None:
        self.turns += 1
        if self.cut:
            error = TransportLostError("RDMA operation failed: RETRY_EXC_ERR (status 12)")
            error.cause = "RETRY_EXC_ERR"
            raise error
        self._left -= 1
        if self._left <= 0 and not self.silent:
            while self._under_way:
                pending, data = self._under_way.popleft()
                pending.finish(data)


@pytest.fixture
def transports(monkeypatch: pytest.MonkeyPatch) -> list[SlowTransport]:
    SlowTransport.made = []
    monkeypatch.setattr("services.dpu_gateway.attach.ShmTransport", SlowTransport)
    return SlowTransport.made


async def turns_of_the_event_loop(during: Callable[[], bool]) -> int:
    count = 0
    while during():
        await asyncio.sleep(0)
        count += 1
    return count


async def test_streams_are_whole_and_the_event_loop_runs_while_reads_are_under_way(
    transports: list[SlowTransport],
) -> None:
    async with gateway(Behaviour(tokens_per_second=300)) as system:
        calls = [asyncio.create_task(collect(system.inference().Generate(text_request()))) for _ in range(4)]
        turns = await turns_of_the_event_loop(lambda: not all(call.done() for call in calls))
        results = [call.result() for call in calls]
        assert {result.code for result in results} == {grpc.StatusCode.OK}
        assert len({result.text for result in results}) == 1
        (transport,) = transports
        assert transport.turns > 0
        assert turns > transport.turns // 2  # it was not one coroutine that turned alone


async def test_a_link_that_dies_ends_streams_as_retryable_is_counted_by_name_and_is_made_anew(
    transports: list[SlowTransport],
) -> None:
    async with gateway(Behaviour(tokens_per_second=10)) as system:
        streams = [asyncio.create_task(collect(system.inference().Generate(text_request()))) for _ in range(3)]
        await until(lambda: int(system.engine.lanes[0].live.sum()) == 3)
        transports[0].cut = True
        for result in await asyncio.gather(*streams):
            assert result.code is grpc.StatusCode.UNAVAILABLE
            assert "RETRY_EXC_ERR" in result.details
            assert retry_after(result) == 0.5
        await until(lambda: len(transports) == 2 and system.workers[0].link.session is not None)
        assert (await collect(system.inference().Generate(text_request(stop=max_tokens(3))))).code is grpc.StatusCode.OK
        async with http_client(system) as client:
            seen = await scrape(client)
        assert seen.value("blink_engine_losses_total", cause="RETRY_EXC_ERR") == 1


async def test_nothing_waits_for_a_silent_link_but_what_needs_it(transports: list[SlowTransport]) -> None:
    """Scrapes, load, and a request that needs the slots' statuses, all while no read comes back."""
    async with gateway(info=ring_info(slots_per_lane=2)) as system, http_client(system) as client:
        for _ in range(2):  # both slots have been used, so the next request asks the engine which are free
            assert (await collect(system.inference().Generate(text_request()))).code is grpc.StatusCode.OK
        (transport,) = transports
        transport.silent = True
        scrapes = [asyncio.create_task(scrape(client)) for _ in range(8)]
        load = system.control().GetLoad(control_pb2.GetLoadRequest())
        stream = asyncio.create_task(collect(system.inference().Generate(text_request())))
        before = transport.turns
        await until(lambda: transport.turns > before + 200)  # each has asked its turn many times
        assert (await client.get("/ready")).status_code == 200
        assert not load.done()
        assert not any(task.done() for task in (*scrapes, stream))
        assert transport.waited == 0
        assert transport.under_way <= 3  # the reader's look, the statuses, and one header for all who asked for it
        transport.cut = True
        for seen in await asyncio.gather(*scrapes):
            assert seen.value("blink_engine_state", state="unreachable") == 1
        assert (await load).engine_state == control_pb2.ENGINE_STATE_UNREACHABLE
        ended = await stream
        assert (ended.code, "RETRY_EXC_ERR" in ended.details) == (grpc.StatusCode.UNAVAILABLE, True)
        await until(lambda: len(transports) == 2 and system.workers[0].link.session is not None)


async def test_attaching_over_a_silent_link_leaves_the_event_loop_to_others(
    transports: list[SlowTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its reads the link goes silent at."""
    async with gateway() as system, http_client(system) as client:
        for silent_from in range(1, 6):
            monkeypatch.setattr(SlowTransport, "silent_from", silent_from)
            transports[-1].cut = True
            await until(lambda: len(transports) == silent_from + 1 and transports[-1].silent)  # noqa: B023
            assert (await client.get("/ready")).status_code == 503
            assert transports[-1].waited == 0
        monkeypatch.setattr(SlowTransport, "silent_from", None)
        transports[-1].cut = True
        await until(lambda: system.workers[0].link.session is not None)


async def test_giving_the_lane_back_over_a_silent_link_leaves_the_event_loop_to_others(
    transports: list[SlowTransport],
) -> None:
    async with gateway() as system:
        (transport,) = transports
        await until(lambda: system.session.liveness.serving)
        transport.silent = True
        link = system.workers[0].link_task
        link.cancel()
        before = transport.turns
        await until(lambda: transport.turns > before + 200)
        assert not link.done()
        assert transport.waited == 0
        transport.cut = True
        await until(link.done)
        assert link.cancelled()


async def test_requests_wait_for_a_link_that_does_not_keep_up_and_nothing_else_does(
    transports: list[SlowTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway() as system:
        (transport,) = transports
        monkeypatch.setattr(SlowTransport, "busy", True)
        writes = transport.counters.writes
        streams = [asyncio.create_task(collect(system.inference().Generate(text_request()))) for _ in range(3)]
        await until(lambda: system.session.free_slots == system.session.geometry.slots_per_lane - 3)
        before = transport.turns
        await until(lambda: transport.turns > before + 300)
        assert not any(stream.done() for stream in streams)
        assert transport.counters.writes <= writes + 2  # renewals of the lease
        monkeypatch.setattr(SlowTransport, "busy", False)
        assert {result.code for result in await asyncio.gather(*streams)} == {grpc.StatusCode.OK}
