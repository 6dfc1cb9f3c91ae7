"""The control loop's host side: memory, start, and the wait for its end. None of it runs while the loop does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver as cu

from services.gpu_engine.cuda.control_loop.errors import ControlLoopError
from services.gpu_engine.cuda.driver import Buffer, Device, Module, Stream, check, pointer
from services.gpu_engine.cuda.errors import DriverError
from services.gpu_engine.cuda.graph_cache import DecodeSteps, ExecutableGraph, GraphCache, Progress, Record, capture
from services.gpu_engine.cuda.step_arrays import StepAddresses
from services.gpu_engine.cuda.step_loop import MAX_EOS_TOKENS, CoreAudit, LoopConfig, StepLoop, gpu_failed
from services.ring.schema import MAX_TOP_LOGPROBS

_STAGES = ("retired", "absorbed", "planned", "launched", "published", "polled", "ended")
STEP_TRACE = np.dtype([(name, "<u8") for name in _STAGES])
"""StepTrace of loop.cuh: nanoseconds of the GPU's global timer."""
TRACE_STEPS = 4096


class _Settings(ctypes.Structure):
    """LoopSettings of loop.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("ring", "outbound", "epoch", "first_position", "lease_us")),
        ("cache_seed", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("page_size", "page_count", "max_running", "max_batched_tokens")),
        *((name, ctypes.c_uint32) for name in ("max_waiting", "priority_boost", "prefix_cache", "share_decoded")),
        ("eos_count", ctypes.c_uint32),
        ("eos", ctypes.c_uint32 * MAX_EOS_TOKENS),
        *((name, ctypes.c_uint32) for name in ("poll_us", "idle_sleep_ns", "launch_limit")),
    )


class _StepGraphs(ctypes.Structure):
    """StepGraphs of loop.cuh."""

    _fields_ = (("graphs", ctypes.c_uint64), ("count", ctypes.c_uint32), ("decode", ctypes.c_uint32))


class _Result(ctypes.Structure):
    """core::StepResult."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"))


class ControlLoop(StepLoop):
    """The loop on the GPU. From ``start`` on nothing on the host may make the device wait: no allocation, no module
    load, no default stream.

    Args:
        cubin: of ``build_control_loop``.
        ring: addresses of the formatted ring and of all lanes' outbound areas, as the GPU sees them.

    Attributes:
        nbytes: device memory of the scheduling core and the step.

    Raises:
        OutOfDeviceMemoryError
    """

    def __init__(self, device: Device, cubin: bytes, config: LoopConfig, ring: tuple[int, int], epoch: int) -> None:
        super().__init__(device, config, epoch)
        self._module = Module(cubin)
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
        self._graph: ExecutableGraph | None = None
        self._ended = check("cuEventCreate", cu.cuEventCreate(_BLOCKING_EVENT))

    def _lay_out(self, settings: _Settings, memory: int) -> npt.NDArray[np.uint64]:
        words = len(fields(StepAddresses)) - len(self._results)  # less what memory takes, and the size
        addresses = Buffer(8 * words)
        result = _Result(*(buffer.pointer for buffer in self._results))
        arguments = (pointer(self._loop), settings, result, pointer(memory), pointer(addresses))
        self._module.kernel("lay_out_loop").launch(self._stream, (1, 1, 1), 1, arguments)
        return addresses.download(np.uint64, (words,))

    def _capture(
        self, record: Record, buckets: Sequence[int], progress: Progress, decode: DecodeSteps | None
    ) -> GraphCache:
        retire = self._module.kernel("retire_step")
        arguments = (pointer(self._loop), pointer(self._trace))

        def whole(record: Record) -> Record:
            def launch(stream: Stream, bucket: int) -> None:
                record(stream, bucket)
                retire.launch(stream, (1, 1, 1), 1, arguments)

            return launch

        return GraphCache(self._device, whole(record), buckets, progress, decode=decode and decode.around(whole))

    def _prepare(self, graphs: GraphCache) -> Callable[[], None]:
        kernel = self._module.kernel("control_loop")
        decode = len(graphs.decode_buckets)
        table = _StepGraphs(graphs.table.pointer, decode + len(graphs.buckets), decode)
        arguments = (pointer(self._loop), table, pointer(self._trace))
        threads = int(self._module.constant("loop_threads"))
        name = "the control loop"
        captured = capture(name, self._stream, lambda: kernel.launch(self._stream, (1, 1, 1), threads, arguments))
        graph = self._graph = ExecutableGraph(name, captured, self._stream, instances=1)

        def launch() -> None:
            graph.launch(self._stream)
            check("cuEventRecord", cu.cuEventRecord(self._ended, self._stream.handle))

        return launch

    def wait(self) -> None:
        """Sleep in the kernel until the loop has ended by STOP: no host thread is runnable. Raises ControlLoopError."""
        try:
            check("cuEventSynchronize", cu.cuEventSynchronize(self._ended))
        except DriverError as error:
            raise gpu_failed(error) from error
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

    def audit(self) -> CoreAudit:
        words = Buffer(8 * len(fields(CoreAudit)))
        arguments = (pointer(self._loop), pointer(words))
        self._module.kernel("audit_loop").launch(self._stream, (1, 1, 1), 1, arguments)
        return CoreAudit(*map(int, words.download(np.uint64, (len(fields(CoreAudit)),))))

    def trace(self) -> npt.NDArray[np.void]:
        """[TRACE_STEPS] of STEP_TRACE by step number; only after the loop's end, and when built with trace."""
        return self._trace.download(STEP_TRACE, (TRACE_STEPS,))

    def _word(self, offset_name: str) -> int:
        return int(self._loop.download(np.uint64, (1,), int(self._module.constant(offset_name)))[0])


_BLOCKING_EVENT = (
    cu.CUevent_flags.CU_EVENT_BLOCKING_SYNC.value | cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
)  # waiting costs no CPU time


def _settings(config: LoopConfig, ring: tuple[int, int], epoch: int) -> _Settings:
    eos = list(config.eos_token_ids)
    return _Settings(
        ring=ring[0],
        outbound=ring[1],
        epoch=epoch,
        first_position=config.first_position,
        lease_us=config.lease_us,
        page_size=config.page_size,
        page_count=config.page_count,
        max_running=config.max_running,
        max_batched_tokens=config.max_batched_tokens,
        max_waiting=config.max_waiting,
        priority_boost=config.priority_boost,
        prefix_cache=config.prefix_cache,
        share_decoded=config.share_decoded,
        cache_seed=config.cache_seed,
        eos_count=len(eos),
        eos=(ctypes.c_uint32 * MAX_EOS_TOKENS)(*eos),
        poll_us=config.poll_us,
        idle_sleep_ns=config.idle_sleep_ns,
        launch_limit=config.launch_limit,
    )
