"""Which gateway owns which lane."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from services.bootstrap.errors import NoFreeLaneError
from services.ring.schema import LanePhase


@dataclass(frozen=True)
class LaneGrant:
    """``gateway_epoch`` is what the gateway writes into the lane to take possession."""

    lane: int
    gateway_epoch: int


@dataclass
class _Owner:
    gateway: Hashable
    certificate: str
    granted_at: float


class LaneTable:
    """Grants lanes: the same gateway its own again, anybody else one that nobody holds.

    The ring says who is attached; this table only adds who was promised a lane and has not taken it yet. A promise
    lapses after ``promise_seconds``. One certificate holds at most ``per_certificate`` lanes at once, under however
    many names its gateways come; without one, over the unix socket, there is no such limit. Epochs grow over restarts
    of bootstrap too, so that none is ever used twice.
    """

    def __init__(
        self,
        lanes: int,
        promise_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        first_epoch: int | None = None,
        *,
        per_certificate: int | None = None,
    ) -> None:
        self._per_certificate = lanes if per_certificate is None else per_certificate
        self._owners: list[_Owner | None] = [None] * lanes
        self._promise_seconds = promise_seconds
        self._clock = clock
        self._next_epoch = time.time_ns() if first_epoch is None else first_epoch

    def grant(self, gateway: Hashable, phases: Sequence[int], certificate: str = "") -> LaneGrant:
        """Pick a lane for a gateway.

        Args:
            gateway: who asks.
            phases: [lanes] of LanePhase, as the engine publishes them now.
            certificate: the name in its certificate; empty without TLS.

        Raises:
            NoFreeLaneError: every lane is attached or promised to others, or the certificate holds all that it may.
        """
        now = self._clock()
        lane = self._own_lane(gateway)
        if lane is None:
            if certificate and self._held_by(certificate, phases, now) >= self._per_certificate:
                raise NoFreeLaneError(
                    f"certificate {certificate!r} holds {self._per_certificate} lanes, and lanes_per_certificate is "
                    f"{self._per_certificate}: raise it, or give each gateway a certificate of its own"
                )
            lane = self._free_lane(phases, now)
        if lane is None:
            raise NoFreeLaneError(f"all {len(self._owners)} lanes are leased; start bootstrap with more lanes")
        self._owners[lane] = _Owner(gateway, certificate, now)
        epoch = self._next_epoch
        self._next_epoch += 1
        return LaneGrant(lane, epoch)

    def _own_lane(self, gateway: Hashable) -> int | None:
        for lane, owner in enumerate(self._owners):
            if owner is not None and owner.gateway == gateway:
                return lane
        return None

    def _held(self, lane: int, phases: Sequence[int], now: float) -> bool:
        """Whether it is attached by somebody, or promised to somebody still."""
        owner = self._owners[lane]
        promised = owner is not None and now - owner.granted_at < self._promise_seconds
        return promised or phases[lane] != LanePhase.FREE

    def _held_by(self, certificate: str, phases: Sequence[int], now: float) -> int:
        """Lanes that this certificate's gateways hold."""
        return sum(
            owner is not None and owner.certificate == certificate and self._held(lane, phases, now)
            for lane, owner in enumerate(self._owners)
        )

    def _free_lane(self, phases: Sequence[int], now: float) -> int | None:
        """A lane nobody had yet, else the one whose owner is gone longest: restarted gateways find their own."""

        def granted_at(lane: int) -> float:
            owner = self._owners[lane]
            return -math.inf if owner is None else owner.granted_at

        free = (lane for lane in range(len(self._owners)) if not self._held(lane, phases, now))
        return min(free, key=granted_at, default=None)
