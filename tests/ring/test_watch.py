"""Alive is a heartbeat that moves; well is steps that move."""

from __future__ import annotations

import pytest

from services.ring.errors import EngineRestartedError
from services.ring.header import read_status
from services.ring.record import pack_record
from services.ring.schema import EngineState, FinishReason
from services.ring.watch import EngineWatch
from tests.support.lanes import lane_pair
from tests.support.stand_in_engine import StandInEngine


def test_heartbeat_and_steps_age_only_while_they_stand_still() -> None:
    pair = lane_pair()
    watch = EngineWatch(pair.transport, pair.engine.epoch, clock=pair.clock)
    watch.look()
    pair.clock.now += 1
    pair.engine.step()  # idle: a heartbeat, no step
    life = watch.look()
    assert (life.state, life.heartbeat_age, life.step_age) == (EngineState.READY, 0, 1)
    pair.engine.behaviour.heartbeat_frozen = True
    pair.clock.now += 2
    pair.engine.step()
    assert watch.look().heartbeat_age == 2


def test_a_restarted_engine_is_an_error() -> None:
    pair = lane_pair()
    watch = EngineWatch(pair.transport, pair.engine.epoch)
    StandInEngine(pair.region, epoch=pair.engine.epoch + 1)
    with pytest.raises(EngineRestartedError, match=f"was {pair.engine.epoch}"):
        watch.look()


def test_status_is_one_read_of_all_counters() -> None:
    pair = lane_pair()
    pair.lane.submit(pack_record([1], slot=0, max_tokens=4), 0)
    pair.run()
    reads = pair.transport.counters.reads
    status = read_status(pair.transport, pair.info.geometry)
    assert pair.transport.counters.reads == reads + 1
    assert status.engine["epoch"] == pair.engine.epoch
    assert status.counters["finished"][FinishReason.LENGTH] == 1
    assert status.lanes["generated_tokens"].tolist() == [4]
