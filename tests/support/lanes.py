"""A lane with both its sides in one process, stepped by hand: no threads, no time but the test's own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.ring.header import RingInfo
from services.ring.lane import LaneClient
from services.ring.loopback import Faults, LoopbackTransport
from services.ring.memory import Region
from services.ring.transport import Transport
from tests.support.rings import private_ring, ring_info
from tests.support.stand_in_engine import Behaviour, StandInEngine

LEASE_TIMEOUT = 10.0


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class LanePair:
    info: RingInfo
    region: Region
    clock: Clock
    transport: LoopbackTransport
    lane: LaneClient
    engine: StandInEngine

    def attach(self) -> None:
        """Let the lane's client attach, whatever the link does."""
        self.lane.begin_attach()
        self.transport.flush()
        self.engine.step()
        assert self.lane.attached()
        self.transport.flush()

    def rival(self, gateway_epoch: int, *, lane: int = 0, transport: Transport | None = None) -> LaneClient:
        """Another gateway, of the same lane unless told otherwise."""
        return LaneClient(
            transport or LoopbackTransport(self.region),
            self.info.geometry,
            lane,
            gateway_epoch=gateway_epoch,
            lease_timeout=LEASE_TIMEOUT,
            clock=self.clock,
        )

    def run(self, rounds: int = 20) -> npt.NDArray[np.void]:
        """Let both sides work in turn; the log entries that the gateway read."""
        parts = []
        for _ in range(rounds):
            self.engine.step()
            self.lane.poll()
            parts.append(self.lane.read_log())
            self.lane.acknowledge()
        return np.concatenate(parts)


def lane_pair(
    info: RingInfo | None = None,
    behaviour: Behaviour | None = None,
    *,
    gateway_epoch: int = 7,
    faults: Faults | None = None,
    attach: bool = True,
) -> LanePair:
    """A ring in private memory, its stand-in engine and the client of lane 0, attached unless told otherwise."""
    info = info or ring_info()
    region = private_ring(info)
    clock = Clock()
    behaviour = replace(behaviour or Behaviour(), clock=clock)
    transport = LoopbackTransport(region, faults)
    lane = LaneClient(
        transport, info.geometry, 0, gateway_epoch=gateway_epoch, lease_timeout=LEASE_TIMEOUT, clock=clock
    )
    pair = LanePair(info, region, clock, transport, lane, StandInEngine(region, behaviour))
    if attach:
        pair.attach()
    return pair
