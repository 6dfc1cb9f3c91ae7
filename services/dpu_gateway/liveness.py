"""Judges whether the engine can be relied on: it lives, and requests in it get anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.ring.schema import EngineState
from services.ring.watch import EngineWatch


class EngineLostError(Exception):
    """The engine that the lane was attached to is gone. The message is fit for callers."""


class Liveness:
    """Watches one attachment.

    What counts is the time between looks, so a gateway that was itself stopped for a while blames nobody. A stall is
    requests in the engine and no step for ``progress_timeout`` seconds, the heartbeat beating all the while.
    """

    def __init__(
        self,
        watch: EngineWatch,
        heartbeat_timeout: float,
        progress_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch = watch
        self._heartbeat_timeout = heartbeat_timeout
        self._progress_timeout = progress_timeout
        self._clock = clock
        self._idle_at = clock()  # when the engine was last seen without requests
        self.state: EngineState | None = None
        self.heartbeat_age = 0.0
        self.stalled = False

    @property
    def serving(self) -> bool:
        """Whether new requests can be expected to get tokens."""
        return self.state is EngineState.READY and not self.stalled

    def look(self, *, busy: bool) -> None:
        """Take note of the engine's status; ``busy``: it has requests. Raises EngineLostError or RingError."""
        life = self._watch.look()
        self.heartbeat_age = life.heartbeat_age
        if life.heartbeat_age >= self._heartbeat_timeout:
            raise EngineLostError(f"the engine's heartbeat stopped {life.heartbeat_age:.1f} s ago")
        if life.state is EngineState.FAILED:
            raise EngineLostError("the engine failed")
        self.state = life.state
        now = self._clock()
        if not busy:
            self._idle_at = now
        self.stalled = min(life.step_age, now - self._idle_at) >= self._progress_timeout
