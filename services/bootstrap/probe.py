"""``python -m services.bootstrap.probe``: is this machine's engine alive? For a container's probe, with transport shm.

Alive is: its ring is there, its state is READY or DRAINING, its heartbeat moves, and requests that run make steps.
Exits with 0, or with one line that says what is wrong.
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's BLAS, never called here

from services.common.errors import BlinkError
from services.common.runtime import DEFAULT_INSTANCE, ring_path
from services.ring.errors import RingError
from services.ring.header import read_ring_info, read_status
from services.ring.schema import EngineState
from services.ring.shm import ShmTransport

ALIVE = {EngineState.READY, EngineState.DRAINING}
WATCH_SECONDS = 4.0
LOOK_SECONDS = 0.1


def require_alive(instance: str, watch: float = WATCH_SECONDS) -> None:
    """Look until heartbeat and progress are seen, for ``watch`` seconds at most. Raises BlinkError."""
    ring = ShmTransport(ring_path(instance))
    geometry = read_ring_info(ring).geometry
    first = read_status(ring, geometry)
    end = time.monotonic() + watch
    while True:
        now = read_status(ring, geometry)
        state = EngineState(int(now.engine["state"]))
        if state not in ALIVE:
            raise BlinkError(f"the engine's state is {state.name}")
        beats = now.engine["heartbeat"] != first.engine["heartbeat"]
        moves = now.engine["steps"] != first.engine["steps"] or not now.counters["running"]
        if beats and moves:
            return
        if time.monotonic() >= end:
            missing = "its requests make no steps" if beats else "its heartbeat stands still"
            raise BlinkError(f"the engine is not alive: {missing} for {watch:g} s")
        time.sleep(LOOK_SECONDS)


def main() -> None:
    """The probe."""
    try:
        require_alive(os.environ.get("BLINK_BOOTSTRAP_INSTANCE", DEFAULT_INSTANCE))
    except (BlinkError, RingError) as error:
        sys.exit(f"blink: {error}")


if __name__ == "__main__":
    main()
