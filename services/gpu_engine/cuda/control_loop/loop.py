"""The control loop's host side: memory, start, and the wait for its end. None of it runs while the loop does."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver as cu

from services.gpu_engine.cuda.control_loop.errors import ControlLoopError
from services.gpu_engine.cuda.driver import Buffer, Device, Module, Stream, check, pointer
from services.gpu_engine.cuda.errors import DriverError
from services.gpu_engine.cuda.graph_cache import DeviceGraph, GraphCache, Progress, Record, capture
from services.gpu_engine.cuda.step_arrays import StepAddresses
from services.ring.schema import MAX_TOP_LOGPROBS

MAX_LAUNCHES = 120  # kMaxLaunches of loop.cuh
MAX_EOS_TOKENS = 8
_STAGES = ("retired", "absorbed", "planned", "launched", "published", "polled", "ended")
STEP_TRACE = np.dtype([(name, "<u8") for name in _STAGES])
"""StepTrace of loop.cuh: nanoseconds of the GPU's global timer."""
TRACE_STEPS = 4096
_START_SECONDS = 30.0


@dataclass(frozen=True)
class LoopConfig:
    """How the control loop schedules. The first eight are the scheduling core's (SchedulerConfig of _core.pyi).

    Attributes:
        poll_us: between two polls of the ring while a step runs, or while there is nothing to run.
        idle_sleep_ns: between two looks at the doorbells while there is nothing to run.
        launch_limit: steps of one execution of the loop, before it launches itself anew.
    """

    page_size: int
    page_count: int
    max_running: int
    max_batched_tokens: int
    max_waiting: int = 1024
    priority_boost: int = 32
    lease_us: int = 5_000_000
    eos_token_ids: Sequence[int] = ()
    first_position: int = 0
    poll_us: int = 1000
    idle_sleep_ns: int = 500
    launch_limit: int = MAX_LAUNCHES


class _Settings(ctypes.Structure):
    """LoopSettings of loop.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("ring", "epoch", "first_position", "lease_us")),
        *((name, ctypes.c_uint32) for name in ("page_size", "page_count", "max_running", "max_batched_tokens")),
        *((name, ctypes.c_uint32) for name in ("max_waiting", "priority_boost", "eos_count")),
        ("eos", ctypes.c_uint32 * MAX_EOS_TOKENS),
        *((name, ctypes.c_uint32) for name in ("poll_us", "idle_sleep_ns", "launch_limit")),
    )


class _Result(ctypes.Structure):
    """core::StepResult."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"))


class ControlLoop:
    """Everything the loop needs on the GPU, then the loop.

    The order is: make it, ``capture`` the step graphs with kernels that read ``step``, ``start`` it, ``wait`` for its
    end. All from one thread.

    Args:
        cubin: of ``build_control_loop``.
        ring: address of the formatted ring, as the GPU sees it.
        epoch: of this start of the engine, not 0.

    Attributes:
        step: addresses for the step's kernels.
        nbytes: device memory of the scheduling core and the step.

    Raises:
        OutOfDeviceMemoryError
    """

    def __init__(self, device: Device, cubin: bytes, config: LoopConfig, ring: int, epoch: int) -> None:
        _check(config, epoch)
        self.config = config
        self._device = device
        self._module = Module(cubin)
        self._stream = Stream()
        self._loop = Buffer(int(self._module.constant("loop_bytes")))
        rows = config.max_running
        self._results = [Buffer(4 * rows * width) for width in (1, 1, MAX_TOP_LOGPROBS, MAX_TOP_LOGPROBS)]
        self._trace = Buffer(STEP_TRACE.itemsize * TRACE_STEPS)
        self._trace.fill(0)
        settings = _settings(config, ring, epoch)
        size = int(self._lay_out(settings, 0)[0])
        self._memory = Buffer(size, "the scheduler's state")
        self._memory.fill(0)
        addresses = self._lay_out(settings, self._memory.pointer)
        names = [field.name for field in fields(StepAddresses)][:-1]
        places = (*map(int, addresses[1:]), *(buffer.pointer for buffer in self._results))
        self.step = StepAddresses(**dict(zip(names, places, strict=True)), memory=(self._memory, *self._results))
        self.nbytes = size + sum(buffer.nbytes for buffer in (*self._results, self._trace, self._loop))
        self.graphs: GraphCache | None = None
        self._graph: DeviceGraph | None = None
        self._ended = check("cuEventCreate", cu.cuEventCreate(_BLOCKING_EVENT))

    def _lay_out(self, settings: _Settings, memory: int) -> npt.NDArray[np.uint64]:
        words = len(fields(StepAddresses)) - len(self._results)  # less what memory takes, and the size
        addresses = Buffer(8 * words)
        result = _Result(*(buffer.pointer for buffer in self._results))
        arguments = (pointer(self._loop), settings, result, pointer(memory), pointer(addresses))
        self._module.kernel("lay_out_loop").launch(self._stream, (1, 1, 1), 1, arguments)
        return addresses.download(np.uint64, (words,))

    def capture(
        self, record: Record, buckets: Sequence[int], progress: Progress = lambda _done, _total: None
    ) -> GraphCache:
        """Make the step graphs. ``record`` launches a step of at most so many tokens over ``step``."""
        if not buckets or buckets[-1] < self.config.max_batched_tokens:
            most = self.config.max_batched_tokens
            raise ValueError(f"buckets end at {list(buckets)[-1:]}, must hold max_batched_tokens, which is {most}")
        retire = self._module.kernel("retire_step")
        arguments = (pointer(self._loop), pointer(self._trace))
        self.graphs = GraphCache(
            self._device, record, lambda stream: retire.launch(stream, (1, 1, 1), 1, arguments), buckets, progress
        )
        return self.graphs

    def start(self, engine_state: Callable[[], int], ready: int) -> None:
        """Launch the loop; returns when ``engine_state()``, a look into the ring, is ``ready``.

        From here on nothing on the host may make the device wait: no allocation, no module load, no default stream.

        Raises:
            ControlLoopError: it ended, or did not get there in time.
        """
        if self.graphs is None:
            raise ValueError("start: the step graphs are not captured")
        kernel = self._module.kernel("control_loop")
        table, count = self.graphs.table, len(self.graphs.buckets)
        arguments = (pointer(self._loop), pointer(table), ctypes.c_uint32(count), pointer(self._trace))
        threads = int(self._module.constant("loop_threads"))
        name = "the control loop"
        graph = capture(name, self._stream, lambda: kernel.launch(self._stream, (1, 1, 1), threads, arguments))
        self._graph = DeviceGraph(name, graph, 1, self._stream)
        gc.collect()  # freeing device memory waits for the device, so not one forgotten buffer may be left to free
        self._device.synchronize()
        self._graph.launch(self._stream)
        check("cuEventRecord", cu.cuEventRecord(self._ended, self._stream.handle))
        deadline = time.monotonic() + _START_SECONDS
        while engine_state() != ready:
            if self.ended:
                self.wait()
                raise ControlLoopError(0, "the control loop ended before it was ready")
            if time.monotonic() > deadline:
                raise ControlLoopError(0, f"the control loop was not ready within {_START_SECONDS:.0f} s")
            time.sleep(0.0005)

    def wait(self) -> None:
        """Sleep in the kernel until the loop has ended by STOP.

        Raises:
            ControlLoopError: it ended for another reason.
        """
        try:
            check("cuEventSynchronize", cu.cuEventSynchronize(self._ended))
        except DriverError as error:
            code = getattr(cu.CUresult, error.name)
            raise ControlLoopError(int(code), f"the GPU failed while serving: {error}") from error
        code = self._word("loop_failure_offset")
        if code != 0:
            _, name = cu.cuGetErrorName(cu.CUresult(code))
            raise ControlLoopError(code, f"the control loop could not launch a graph: {name.decode()}")

    @property
    def ended(self) -> bool:
        """Whether ``wait`` would return at once."""
        return bool(cu.cuEventQuery(self._ended)[0] != cu.CUresult.CUDA_ERROR_NOT_READY)

    @property
    def executions(self) -> int:
        """How often the loop was launched; only after its end."""
        return self._word("loop_executions_offset")

    def trace(self) -> npt.NDArray[np.void]:
        """[TRACE_STEPS] of STEP_TRACE by step number; only after the loop's end, and when built with trace."""
        return self._trace.download(STEP_TRACE, (TRACE_STEPS,))

    def _word(self, offset_name: str) -> int:
        return int(self._loop.download(np.uint64, (1,), int(self._module.constant(offset_name)))[0])


_BLOCKING_EVENT = (
    cu.CUevent_flags.CU_EVENT_BLOCKING_SYNC.value | cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
)  # waiting costs no CPU time


def _check(config: LoopConfig, epoch: int) -> None:
    limits = {
        "page_size": (config.page_size, 1, 1 << 16),
        "page_count": (config.page_count, 1, 1 << 30),
        "max_running": (config.max_running, 1, 1 << 16),
        "max_batched_tokens": (config.max_batched_tokens, 1, 1 << 24),
        "max_waiting": (config.max_waiting, 1, 1 << 31),
        "priority_boost": (config.priority_boost, 0, 1 << 20),
        "lease_us": (config.lease_us, 1, 1 << 60),
        "number of eos_token_ids": (len(config.eos_token_ids), 0, MAX_EOS_TOKENS),
        "poll_us": (config.poll_us, 1, 100_000),
        "idle_sleep_ns": (config.idle_sleep_ns, 0, 1_000_000),
        "launch_limit": (config.launch_limit, 1, MAX_LAUNCHES),
        "epoch": (epoch, 1, (1 << 64) - 1),
    }
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, must be {low} to {high}")


def _settings(config: LoopConfig, ring: int, epoch: int) -> _Settings:
    eos = list(config.eos_token_ids)
    return _Settings(
        ring=ring,
        epoch=epoch,
        first_position=config.first_position,
        lease_us=config.lease_us,
        page_size=config.page_size,
        page_count=config.page_count,
        max_running=config.max_running,
        max_batched_tokens=config.max_batched_tokens,
        max_waiting=config.max_waiting,
        priority_boost=config.priority_boost,
        eos_count=len(eos),
        eos=(ctypes.c_uint32 * MAX_EOS_TOKENS)(*eos),
        poll_us=config.poll_us,
        idle_sleep_ns=config.idle_sleep_ns,
        launch_limit=config.launch_limit,
    )
