"""Bootstrap with the stand-in engine, as a process: ``python -m tests.bootstrap.stand_in_host``.

``BLINK_TEST_FAULT`` makes the engine misbehave: ``load`` (refuses), ``slow`` (loads for ever), ``loop`` (ends by
itself after it was ready) or ``still`` (its control loop stands still). With ``BLINK_TEST_MOVED`` it keeps its ring
where bootstrap alone reaches it, as an engine does whose ring is in GPU memory.
"""

import signal

from services.bootstrap.parking import SIGNALS

signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

import os  # noqa: E402
import threading  # noqa: E402
from collections.abc import Callable  # noqa: E402

from services.bootstrap.engine import Progress  # noqa: E402
from services.bootstrap.errors import BootstrapError  # noqa: E402
from services.bootstrap.host import serve  # noqa: E402
from services.bootstrap.settings import BootstrapSettings  # noqa: E402
from services.common.process import run_process  # noqa: E402
from services.gpu_engine.engine import Engine, MovedRing  # noqa: E402
from services.gpu_engine.models.checkpoint import Checkpoint  # noqa: E402
from services.ring.header import RingInfo  # noqa: E402
from services.ring.memory import MemoryTransport, Region  # noqa: E402
from services.ring.parts import HostPart  # noqa: E402
from tests.support.stand_in_engine import Behaviour, StandInEngine  # noqa: E402

FAULT = os.environ.get("BLINK_TEST_FAULT", "")
MOVED = "BLINK_TEST_MOVED" in os.environ


class StandIn(Engine):
    def __init__(self, region: Region, epoch: int) -> None:
        if MOVED:
            region = region.copy()
            self.ring = MovedRing(MemoryTransport(region), [HostPart(0, region)])
        self._engine = StandInEngine(region, Behaviour(), epoch=epoch)

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        self._engine.step()
        on_ready()
        if FAULT == "loop":
            raise RuntimeError("the loop is broken")
        if FAULT == "still":
            self._engine.behaviour.heartbeat_frozen = True
        self._engine.run()


def build(
    settings: BootstrapSettings,
    checkpoint: Checkpoint,
    info: RingInfo,
    *,
    epoch: int,
    region: Region,
    progress: Progress,
) -> StandIn:
    progress("weights", 0, 100)
    if FAULT == "load":
        raise BootstrapError("the weights are broken")
    if FAULT == "slow":
        threading.Event().wait()
    progress("weights", 100, 100)
    return StandIn(region, epoch)


if __name__ == "__main__":
    run_process(BootstrapSettings, lambda settings: serve(settings, build))
