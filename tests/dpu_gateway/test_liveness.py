from __future__ import annotations

import pytest

from services.dpu_gateway.liveness import EngineLostError, Liveness
from services.ring.header import RingStatus, read_status
from services.ring.memory import MemoryTransport
from services.ring.schema import EngineState
from tests.support.lanes import Clock
from tests.support.rings import private_ring, ring_info
from tests.support.stand_in_engine import StandInEngine


class Watched:
    """An engine stepped by hand and the liveness under test: heartbeat 2 s, progress 10 s."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.info = ring_info()
        self.region = private_ring(self.info)
        self.transport = MemoryTransport(self.region)
        self.engine = StandInEngine(self.region, epoch=3)
        self.liveness = Liveness(3, heartbeat_timeout=2, progress_timeout=10, clock=self.clock)

    def look(self, *, busy: bool) -> None:
        """``busy``: requests are in the engine."""
        status = read_status(self.transport, self.info.geometry)
        counters = status.counters.copy()
        counters["waiting"] = busy
        self.liveness.look(RingStatus(status.engine, counters, status.lanes))

    def beat(self, seconds: float, *, busy: bool) -> None:
        """The engine beats and is looked at once a second."""
        for _ in range(int(seconds)):
            self.clock.now += 1
            self.engine.step()
            self.look(busy=busy)


def test_a_beating_ready_engine_serves_however_long_it_is_idle() -> None:
    watched = Watched()
    assert not watched.liveness.serving  # nothing was seen yet
    watched.beat(1000, busy=False)
    assert watched.liveness.serving


def test_a_heartbeat_that_stands_still_is_a_lost_engine() -> None:
    watched = Watched()
    watched.beat(3, busy=False)
    watched.clock.now += 1.9
    watched.look(busy=False)
    watched.clock.now += 0.2
    with pytest.raises(EngineLostError, match=r"heartbeat stopped 2\.1 s ago"):
        watched.look(busy=False)


def test_a_gateway_that_was_itself_stopped_does_not_blame_the_engine() -> None:
    watched = Watched()
    watched.beat(1, busy=True)
    watched.clock.now += 3600
    watched.engine.step()
    watched.look(busy=False)
    assert watched.liveness.serving


def test_a_heart_that_beats_while_no_step_is_made_is_a_stall_only_with_requests() -> None:
    watched = Watched()
    watched.beat(100, busy=False)
    watched.beat(10, busy=True)
    assert watched.liveness.stalled
    assert not watched.liveness.serving
    watched.beat(1, busy=False)
    assert watched.liveness.serving


def test_the_first_request_after_a_long_idle_time_is_not_taken_for_a_stall() -> None:
    watched = Watched()
    watched.beat(100, busy=False)
    watched.beat(9, busy=True)
    assert watched.liveness.serving


@pytest.mark.parametrize("state", [EngineState.BOOTING, EngineState.DRAINING])
def test_an_engine_that_takes_no_requests_does_not_serve_but_is_not_lost(state: EngineState) -> None:
    watched = Watched()
    watched.engine.state = state
    watched.beat(1, busy=False)
    assert not watched.liveness.serving


def test_a_failed_engine_is_lost() -> None:
    watched = Watched()
    watched.engine.state = EngineState.FAILED
    with pytest.raises(EngineLostError, match="the engine failed"):
        watched.beat(1, busy=False)


def test_another_epoch_is_a_restart() -> None:
    watched = Watched()
    StandInEngine(watched.region, epoch=4)
    with pytest.raises(EngineLostError, match="restarted"):
        watched.look(busy=False)
