"""What cannot go on ends as FAILED in the ring, with a code, and never hangs whoever waits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda engine's libraries are not installed: pip install 'blink[cuda]'")

from cuda.bindings import driver as cu

from services.gpu_engine.cuda.assemble import SchedulerPlace
from services.gpu_engine.cuda.control_loop.errors import ControlLoopError, GraphCacheError
from services.gpu_engine.cuda.driver import Stream, check
from services.ring.schema import DescriptorFlag, EngineState
from tests.gpu.serving import serving
from tests.gpu_engine.core.machine import record

pytestmark = pytest.mark.usefixtures("device")  # which skips where there is no GPU

PROMPT = [5, 9, 200, 41, 7]


def test_a_refused_launch_fails_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop that never relaunches itself runs into CUDA's limit of launches."""
    monkeypatch.setattr("services.gpu_engine.cuda.step_loop.MAX_LAUNCHES", 1 << 20)
    with serving(launch_limit=1 << 20, max_context=512, page_count=512) as engine:
        gateway = engine.attach()
        gateway.submit(record(PROMPT, max_tokens=400, flags=DescriptorFlag.IGNORE_EOS), 0)
        with pytest.raises(ControlLoopError, match="could not launch a graph") as caught:
            engine.wait()
        engine.stopped = True
        status = engine.status().engine
        assert status["state"] == EngineState.FAILED
        assert status["failure"] == caught.value.code != 0


@pytest.mark.parametrize("kernel", ["stand_in_trap", "stand_in_assert"])
def test_a_kernel_that_faults_fails_the_engine(kernel: str, scheduler: SchedulerPlace) -> None:
    """In a process of its own, because a fault takes the CUDA context with it."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.faulting_engine", kernel, scheduler],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_the_gpu_cannot_launch_is_refused_by_name() -> None:
    def host_node(stream: Stream, _bucket: int) -> None:
        event = check("cuEventCreate", cu.cuEventCreate(0))
        check("cuEventRecordWithFlags", cu.cuEventRecordWithFlags(event, stream.handle, _EXTERNAL))

    with (
        pytest.raises(GraphCacheError, match=r"the step graph of 2 rows that decode contains \w*EVENT_RECORD"),
        serving(make_record=lambda _step: host_node),
    ):
        pass


_EXTERNAL = cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL.value


def test_buckets_that_do_not_hold_the_largest_step_are_refused() -> None:
    with pytest.raises(ValueError, match="max_batched_tokens"), serving(buckets=(1, 2, 4)):
        pass


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ValueError, match="launch_limit is 121, must be 1 to 120"), serving(launch_limit=121):
        pass
