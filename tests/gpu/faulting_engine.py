"""``python -m tests.gpu.faulting_engine``: an engine whose step faults; checks what the ring says afterwards."""

from __future__ import annotations

import os

import pytest

from services.gpu_engine.cuda.control_loop.errors import ControlLoopError
from services.ring.schema import EngineState
from tests.gpu.serving import serving
from tests.gpu_engine.core.machine import record


def main() -> None:
    with serving(make_record=lambda step: step.trapping(99)) as engine:
        gateway = engine.attach()
        gateway.submit(record([99, 1]), 0)
        with pytest.raises(ControlLoopError) as caught:
            engine.engine.wait()
        status = engine.status().engine
        assert status["state"] == EngineState.FAILED, status
        assert status["failure"] == caught.value.code != 0, status
        os._exit(0)  # nothing of this context can be cleaned up


if __name__ == "__main__":
    main()
