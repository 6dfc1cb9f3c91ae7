"""Judges from the ring's header whether the engine is alive and gets anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.ring.header import RingStatus
from services.ring.schema import EngineState


class EngineLostError(Exception):
    """The engine that the lane was attached to is gone. The message is fit for callers."""


class Liveness:
    """Watches one attachment.

    A heartbeat is dead when two looks at it, ``heartbeat_timeout`` apart, saw the same value: what counts is the time
    of looks, so a gateway that was itself stopped for a while blames nobody. Progress is the count of steps: requests
    in the engine and no new step for ``progress_timeout`` is a stall, with the heartbeat still beating.
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
        self._heartbeat: tuple[int, float] | None = None  # value, when first seen
        self._steps: tuple[int, float] | None = None
        self.state = EngineState.BOOTING
        self.stalled = False

    @property
    def serving(self) -> bool:
        """Whether new requests can be expected to get tokens."""
        return self.state is EngineState.READY and not self.stalled

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the heartbeat was first seen at its present value."""
        return self._clock() - self._heartbeat[1] if self._heartbeat is not None else 0.0

    def look(self, status: RingStatus) -> None:
        """Take note of the header. Raises EngineLostError."""
        now = self._clock()
        epoch = int(status.engine["epoch"])
        if epoch != self._epoch:
            raise EngineLostError("the engine restarted")
        heartbeat, steps = int(status.engine["heartbeat"]), int(status.engine["steps"])
        if self._heartbeat is None or self._heartbeat[0] != heartbeat:
            self._heartbeat = (heartbeat, now)
        elif now - self._heartbeat[1] >= self._heartbeat_timeout:
            raise EngineLostError(f"the engine's heartbeat stopped {now - self._heartbeat[1]:.1f} s ago")
        busy = bool(status.counters["running"] or status.counters["waiting"])
        if self._steps is None or self._steps[0] != steps or not busy:
            self._steps = (steps, now)
        self.stalled = now - self._steps[1] >= self._progress_timeout
        try:
            self.state = EngineState(int(status.engine["state"]))
        except ValueError as error:
            raise EngineLostError(f"the engine's state is unknown: {error}") from error
        if self.state is EngineState.FAILED:
            raise EngineLostError("the engine failed")
