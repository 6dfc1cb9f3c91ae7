"""What the real gateway costs in one-sided operations: the price of each over RDMA is a trip over the network."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from services.ring.schema import LINE_BYTES
from services.ring.shm import ShmTransport
from services.ring.transport import PendingRead
from tests.dpu_gateway.harness import collect, gateway, max_tokens, ring_info, text_request
from tests.support.stand_in_engine import Behaviour

SLOTS = 8
REQUESTS = 4 * SLOTS
TOKENS = 40


class CountingTransport(ShmTransport):
    made: list[CountingTransport]

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.made.append(self)
        self.started: list[tuple[int, int]] = []  # offset and length of the reads that the token reader began

    def start_read(self, offset: int, length: int) -> PendingRead:
        self.started.append((offset, length))
        return super().start_read(offset, length)


async def test_a_step_costs_one_bulk_read_at_most_and_a_request_two_writes_and_its_share_of_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    CountingTransport.made = []
    monkeypatch.setattr("services.dpu_gateway.attach.ShmTransport", CountingTransport)
    info = ring_info(slots_per_lane=SLOTS, log_entries=1 << 14)
    async with gateway(Behaviour(tokens_per_second=200, burst=1), info) as system:
        (transport,) = CountingTransport.made
        before = transport.counters.writes
        for _ in range(REQUESTS // SLOTS):
            request = text_request(stop=max_tokens(TOKENS))
            results = await asyncio.gather(*(collect(system.inference().Generate(request)) for _ in range(SLOTS)))
            assert {result.code for result in results} == {grpc.StatusCode.OK}
            assert {len(result.ids) for result in results} == {TOKENS}
        writes = transport.counters.writes - before
        log = info.geometry.log(system.session.lane.lane)
        bulk = [(offset, length) for offset, length in transport.started if offset >= log]
        steps = system.engine.steps
    assert sum(length for _, length in bulk) >= 16 * REQUESTS * (TOKENS + 2)  # every entry was read
    assert len(bulk) <= steps
    renewals = 8  # quarters of the 3 s lease that may pass on a loaded machine, and eighths of the log
    assert 2 * REQUESTS <= writes <= 2 * REQUESTS + REQUESTS // SLOTS + renewals
    looks = [length for offset, length in transport.started if offset == info.geometry.outbound(0)]
    assert set(looks) == {LINE_BYTES}


async def test_free_slots_cost_one_read_for_as_many_requests_as_there_are_slots_to_spare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    CountingTransport.made = []
    monkeypatch.setattr("services.dpu_gateway.attach.ShmTransport", CountingTransport)
    info = ring_info(slots_per_lane=SLOTS)
    async with gateway(info=info) as system:
        (transport,) = CountingTransport.made
        for _ in range(REQUESTS):
            request = text_request(stop=max_tokens(3))
            assert (await collect(system.inference().Generate(request))).code is grpc.StatusCode.OK
        statuses = info.geometry.slot_status(system.session.lane.lane)
        reads = [length for offset, length in transport.started if offset == statuses]
    assert set(reads) == {8 * SLOTS}
    assert len(reads) <= REQUESTS // (SLOTS - 1)  # the last one's slot may still be the engine's
