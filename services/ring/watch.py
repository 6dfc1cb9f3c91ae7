"""A gateway's view of the engine: alive is a heartbeat that moves, well is steps that move while there is work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from services.ring import schema
from services.ring.errors import EngineRestartedError
from services.ring.schema import LINE_BYTES, EngineState
from services.ring.transport import Transport

_START = schema.header_offset(schema.ENGINE_STATUS)


@dataclass(frozen=True, slots=True)
class EngineLife:
    """What one look at EngineStatus told."""

    state: EngineState | None  # None while the engine has not said any
    heartbeat_age: float  # seconds since this watch last saw the heartbeat move
    step_age: float  # seconds since this watch last saw a step committed
    steps: int


class EngineWatch:
    """Follows EngineStatus; ``engine_epoch`` comes with the grant of the lane."""

    def __init__(self, transport: Transport, engine_epoch: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._engine_epoch = engine_epoch
        self._clock = clock
        self._heartbeat = self._steps = -1
        self._heartbeat_at = self._step_at = clock()

    def look(self) -> EngineLife:
        """One 64-byte read. Raises EngineRestartedError when another engine's epoch is there."""
        line = self._transport.read(_START, LINE_BYTES)
        epoch, state, heartbeat, steps = (int.from_bytes(line[i : i + 8], "little") for i in range(0, 32, 8))
        if epoch != self._engine_epoch:
            raise EngineRestartedError(self._engine_epoch, epoch)
        now = self._clock()
        if heartbeat != self._heartbeat:
            self._heartbeat, self._heartbeat_at = heartbeat, now
        if steps != self._steps:
            self._steps, self._step_at = steps, now
        return EngineLife(
            state=EngineState(state) if state else None,
            heartbeat_age=now - self._heartbeat_at,
            step_age=now - self._step_at,
            steps=steps,
        )
