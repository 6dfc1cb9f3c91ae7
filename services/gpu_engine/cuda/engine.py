"""The cuda engine: one start, one control loop, one wait for its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from services.gpu_engine.cuda.control_loop.errors import ControlLoopError
from services.gpu_engine.cuda.errors import DriverError
from services.gpu_engine.cuda.step_loop import StepLoop
from services.gpu_engine.engine import Engine, MovedRing
from services.ring import schema
from services.ring.schema import EngineState
from services.ring.transport import Transport

_STATE = schema.header_offset(schema.ENGINE_STATUS) + schema.ENGINE_STATUS.offset_of("state")
_FAILURE = schema.header_offset(schema.ENGINE_STATUS) + schema.ENGINE_STATUS.offset_of("failure")


class CudaEngine(Engine):
    """Serves a ring with a control loop whose step graphs are captured; ``transport`` reaches that ring.

    ``memory`` is what the graphs work on; it lives as long as the engine, because freeing it waits for the loop's end.

    DRAIN and STOP come to the loop through the ring's Command, from whoever owns the ring. All methods are called on
    the thread that made the control loop.
    """

    def __init__(
        self, loop: StepLoop, transport: Transport, memory: object = None, ring: MovedRing | None = None
    ) -> None:
        self.loop = loop
        self.ring = ring
        self._memory = memory
        self._transport = transport

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """``start``, ``on_ready``, ``wait``."""
        self.start()
        on_ready()
        self.wait()

    def start(self) -> None:
        """Launch the loop; returns when the ring says READY. Raises ControlLoopError."""
        with self._marking_failure():
            self.loop.start(self._state, EngineState.READY)

    def wait(self) -> None:
        """Sleep until the loop has ended.

        Raises:
            ControlLoopError: it ended for another reason than STOP. When the GPU has failed it can no longer say so
                itself, so the ring is marked FAILED from here.
        """
        with self._marking_failure():
            self.loop.wait()

    @contextmanager
    def _marking_failure(self) -> Iterator[None]:
        try:
            yield
        except ControlLoopError as error:
            with suppress(DriverError):  # a ring in the memory of a GPU that failed: its heartbeat has stopped
                self._transport.write(_FAILURE, error.code.to_bytes(8, "little"), flag=True)
                self._transport.write(_STATE, EngineState.FAILED.to_bytes(8, "little"), flag=True)
            raise

    def _state(self) -> int:
        return int.from_bytes(self._transport.read(_STATE, 8), "little")
