"""Reads that take their time, as over RDMA: the event loop goes on, and a link that dies is a loss by name."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from services.ring.errors import TransportLostError
from services.ring.shm import ShmTransport
from services.ring.transport import PendingRead
from tests.dpu_gateway.harness import collect, gateway, max_tokens, text_request, until
from tests.dpu_gateway.http.clients import http_client
from tests.dpu_gateway.metrics.scraped import scrape
from tests.dpu_gateway.test_refusals import retry_after
from tests.support.stand_in_engine import Behaviour

TURNS = 5  # of the event loop, until a read is done


class SlowTransport(ShmTransport):
    """Shared memory whose reads, once started, are done some turns later; ``cut`` makes them fail."""

    made: list[SlowTransport]

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.made.append(self)
        self.cut = False
        self.turns = 0  # spent waiting
        self._under_way: deque[tuple[PendingRead, bytes]] = deque()
        self._left = 0

    def start_read(self, offset: int, length: int) -> PendingRead:
        pending = PendingRead()
        self._under_way.append((pending, self.read(offset, length)))
        self._left = TURNS
        return pending

    def progress(self) -> None:
        self.turns += 1
        if self.cut:
            error = TransportLostError("RDMA operation failed: RETRY_EXC_ERR (status 12)")
            error.cause = "RETRY_EXC_ERR"
            raise error
        self._left -= 1
        if self._left <= 0:
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
