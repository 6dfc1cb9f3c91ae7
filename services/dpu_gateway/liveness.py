"""Judges from the ring's header whether the engine can be relied on: it lives, and requests in it get anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.ring.header import RingStatus
from services.ring.schema import EngineState


class EngineLostError(Exception):
    """The engine that the lane was attached to is gone. The message is fit for callers."""

    cause = "ENGINE_LOST"


class Liveness:
    """Watches one attachment; ``engine_epoch`` comes with the grant of the lane.

    What counts is the time between looks, so a gateway that was itself stopped for a while blames nobody. A stall is
    requests in the engine and no step for ``progress_timeout`` seconds, the heartbeat beating all the while.
    """

    def __init__(
        self,
        engine_epoch: int,
        heartbeat_timeout: float,
        progress_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epoch = engine_epoch
        self._heartbeat_timeout = heartbeat_timeout
        self._progress_timeout = progress_timeout
        self._clock = clock
        self._heartbeat = self._steps = -1
        self._beat_at = self._progress_at = clock()  # when a beat, and a step or an idle engine, was last seen
        self.state: EngineState | None = None
        self.stalled = False

    @property
    def serving(self) -> bool:
        """Whether new requests can be expected to get tokens."""
        return self.state is EngineState.READY and not self.stalled

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the heartbeat was last seen to move."""
        return self._clock() - self._beat_at

    def look(self, status: RingStatus) -> None:
        """Take note of the header. Raises EngineLostError."""
        now = self._clock()
        engine, counters = status.engine, status.counters
        if int(engine["epoch"]) != self._epoch:
            raise EngineLostError("the engine restarted")
        if int(engine["heartbeat"]) != self._heartbeat:
            self._heartbeat, self._beat_at = int(engine["heartbeat"]), now
        elif now - self._beat_at >= self._heartbeat_timeout:
            raise EngineLostError(f"the engine's heartbeat stopped {now - self._beat_at:.1f} s ago")
        try:
            self.state = EngineState(int(engine["state"]))
        except ValueError as error:
            raise EngineLostError(f"the engine's state makes no sense: {error}") from error
        if self.state is EngineState.FAILED:
            raise EngineLostError("the engine failed")
        busy = bool(counters["running"] or counters["waiting"])
        if int(engine["steps"]) != self._steps or not busy:
            self._steps, self._progress_at = int(engine["steps"]), now
        self.stalled = now - self._progress_at >= self._progress_timeout
