"""The header's changing parts."""

from __future__ import annotations

import pytest

from services.ring.header import RingInfo, format_ring, read_status
from services.ring.memory import allocate_region
from services.ring.record import pack_record
from services.ring.schema import EngineState, FinishReason, LanePhase
from tests.support.lanes import lane_pair
from tests.support.rings import ring_info


def test_status_is_one_read_of_engine_counters_and_lanes() -> None:
    pair = lane_pair(ring_info(lanes=2))
    pair.lane.submit(pack_record([1], slot=0, max_tokens=4), 0)
    pair.run()
    reads = pair.transport.counters.reads
    status = read_status(pair.transport, pair.info.geometry)
    assert pair.transport.counters.reads == reads + 1
    assert (status.engine["epoch"], status.engine["state"]) == (pair.engine.epoch, EngineState.READY)
    assert status.counters["finished"][FinishReason.LENGTH] == 1
    assert status.lanes["generated_tokens"].tolist() == [4, 0]
    assert status.lanes["phase"].tolist() == [LanePhase.ATTACHED, LanePhase.FREE]


def test_a_region_of_another_size_is_not_formatted() -> None:
    region = allocate_region(4096)
    with pytest.raises(ValueError, match="region has 4096 bytes, the ring needs"):
        format_ring(region, ring_info())
    assert not region.any()


def test_a_fingerprint_is_a_sha256() -> None:
    with pytest.raises(ValueError, match="fingerprint has 20 bytes, must have 32"):
        RingInfo(ring_info().geometry, bytes(20), vocabulary_size=1, max_context_tokens=1)
