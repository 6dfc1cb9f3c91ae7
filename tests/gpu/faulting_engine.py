"""``python -m tests.gpu.faulting_engine KERNEL gpu|host``: an engine whose step faults in a kernel of stand_in_step.cu.

Checks what the engine and its ring say afterwards, and that a gateway sees it.
"""

from __future__ import annotations

import os
import sys

import pytest
from cuda.bindings import driver as cu

from services.gpu_engine.cuda.assemble import SchedulerPlace
from services.gpu_engine.cuda.control_loop.errors import ControlLoopError
from services.ring.schema import EngineState
from tests.gpu.serving import serving
from tests.gpu_engine.core.machine import record

CODES = {
    "stand_in_trap": {cu.CUresult.CUDA_ERROR_LAUNCH_FAILED, cu.CUresult.CUDA_ERROR_ILLEGAL_INSTRUCTION},
    "stand_in_assert": {cu.CUresult.CUDA_ERROR_ASSERT},
}


def main(kernel: str, scheduler: SchedulerPlace) -> None:
    with serving(make_record=lambda step: step.faulting(kernel, 99), scheduler=scheduler) as engine:
        gateway = engine.attach()
        position = gateway.submit(record([99, 1]), 0)
        with pytest.raises(ControlLoopError) as caught:
            engine.wait()
        assert caught.value.code in {int(code) for code in CODES[kernel]}, caught.value
        status = engine.status().engine
        assert status["state"] == EngineState.FAILED, status
        assert status["failure"] == caught.value.code, status
        gateway.read()
        assert gateway.stream(position).tokens == []  # nothing of the step that failed
        sys.stdout.flush()
        os._exit(0)  # nothing of this context can be cleaned up


if __name__ == "__main__":
    main(sys.argv[1], "host" if sys.argv[2] == "host" else "gpu")
