"""The host-driven loop: a thread that spins, plans with the scheduling core, launches a step graph, spins for its end.

For comparison with the loop on the GPU (the paper's Figure 3), so made as fast as a host can well be: the core's arrays
are pinned and the step graph fetches them by itself, results arrive in host memory, the thread never sleeps and never
waits in the driver. What a step costs the host is one graph launch and a few calls from Python, none of them per row.
It keeps one core busy for as long as the engine lives.

Sampling penalties read the histories where they lie, in host memory.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from services.gpu_engine.core._core import Scheduler, SchedulerConfig
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.control_loop.errors import ControlLoopError
from services.gpu_engine.cuda.driver import Buffer, Device, Module, Stream, pointer
from services.gpu_engine.cuda.errors import DriverError
from services.gpu_engine.cuda.graph_cache import DecodeSteps, GraphCache, Progress, Record
from services.gpu_engine.cuda.mapped_memory import MappedMemory
from services.gpu_engine.cuda.step_arrays import StepArrays, StepLimits
from services.gpu_engine.cuda.step_loop import CoreAudit, LoopConfig, StepLoop, gpu_failed
from services.ring import _atomics
from services.ring.memory import Region, allocate_region
from services.ring.schema import MAX_TOP_LOGPROBS, Command, EngineState

SOURCE = "services/gpu_engine/cuda/host_loop/host_step.cu"
POLL_NS = 20_000  # between two polls while a step runs; the loop on the GPU looks at its doorbells as often
GPU_CHECK_NS = 1_000_000  # between two questions whether the GPU still works
FETCH_BLOCKS, FETCH_THREADS = 64, 128

ARRAYS = ("token_ids", "positions", "row_start", "kv_length", "sequence", "sample_row", "sampling", "page_table")
"""In the order of Array in host_step.cu."""
ANNOUNCED = np.dtype([("tokens", "<u4"), ("rows", "<u4"), ("samples", "<u4"), ("unused", "<u4"), ("number", "<u8")])
"""Announced of host_step.cu."""
_RETIRED = 64  # offset in the exchange
_RESULTS = 128


class _StepMirror(ctypes.Structure):
    """StepMirror of host_step.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64 * len(ARRAYS)) for name in ("host", "device")),
        *((name, ctypes.c_uint64) for name in ("announced", "counts", "number")),
        *((name, ctypes.c_uint32) for name in ("pages_per_sequence", "page_size")),
    )


class HostLoop(StepLoop):
    """The loop on a host thread, which ``start`` begins.

    Args:
        region: the formatted ring.

    Raises:
        OutOfDeviceMemoryError
        DriverError: the core's memory can't be pinned.
    """

    def __init__(self, device: Device, compiler: Compiler, config: LoopConfig, region: Region, epoch: int) -> None:
        super().__init__(device, config, epoch)
        self._epoch = epoch
        settings = SchedulerConfig(**config.scheduler_settings())
        self._scheduler = Scheduler(region, settings, first_position=config.first_position)
        self._core = MappedMemory(self._scheduler.memory)
        self._module = Module(compiler.build((SOURCE,), {}))
        exchange = _Exchange(config.max_running)
        self._exchange = exchange
        host = self._scheduler.step
        limits = StepLimits(config.max_batched_tokens, config.max_running, host.page_table.shape[1])
        arrays = StepArrays(limits)
        self._number = Buffer(8)
        mapped = exchange.mapped
        self.step = replace(
            arrays.addresses,
            history=self._core.address(host.history),
            **{name: mapped.address(array) for name, array in exchange.results.items()},
            memory=(arrays, self._core, mapped, self._number),
        )
        self._mirror = _StepMirror(
            tuple(self._core.address(getattr(host, name)) for name in ARRAYS),
            tuple(getattr(self.step, name) for name in ARRAYS),
            mapped.address(exchange.announced),
            self.step.counts,
            self._number.pointer,
            limits.pages_per_sequence,
            config.page_size,
        )
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="host-loop", daemon=True)

    def audit(self) -> CoreAudit:
        core = self._scheduler
        live = core.running + core.waiting
        return CoreAudit(live, core.free_pages, core.free_lines, core.held_arena_lines, core.promised_log_entries)

    def wait(self) -> None:
        """Sleep until the thread has ended. Raises ControlLoopError when it was not by STOP."""
        self._thread.join()
        match self._failure:
            case None:
                return
            case DriverError() as error:
                raise gpu_failed(error) from error
            case error:
                raise ControlLoopError(0, f"the host-driven loop ended: {error!r}") from error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def _capture(
        self, record: Record, buckets: Sequence[int], progress: Progress, decode: DecodeSteps | None
    ) -> GraphCache:
        fetch, retire = (self._module.kernel(name) for name in ("fetch_step", "retire_host_step"))
        retired = pointer(self._exchange.mapped.pointer, _RETIRED)

        def whole(record: Record) -> Record:
            def launch(stream: Stream, bucket: int) -> None:
                blocks = min(bucket, self.config.max_running, FETCH_BLOCKS)
                fetch.launch(stream, (blocks, len(ARRAYS), 1), FETCH_THREADS, (self._mirror,))
                record(stream, bucket)
                retire.launch(stream, (1, 1, 1), 1, (pointer(self._number), retired))

            return launch

        whole_decode = decode and decode.around(whole)
        return GraphCache(self._device, whole(record), buckets, progress, decode=whole_decode, from_gpu=False)

    def _prepare(self, graphs: GraphCache) -> Callable[[], None]:
        return self._thread.start

    def _serve(self) -> None:
        gc.freeze()  # what has lived until now is not looked through while the loop runs
        try:
            self._device.make_current()
            self._scheduler.start(self._epoch)
            self._scheduler.set_state(EngineState.READY)
            self._run()
        except BaseException as error:  # wait() reports it
            self._failure = error
        finally:
            gc.unfreeze()

    def _run(self) -> None:
        scheduler = self._scheduler
        number = 0
        while True:
            scheduler.poll(time.monotonic_ns() // 1000)
            if not scheduler.idle and scheduler.plan(time.monotonic_ns() // 1000):
                number += 1
                self._step(number)
            elif scheduler.command == Command.STOP and scheduler.drained:
                return

    def _step(self, number: int) -> None:
        assert self.graphs is not None
        step = self._scheduler.step
        tokens, samples = step.tokens, step.samples
        self._exchange.announced[()] = (tokens, step.rows, samples, 0, number)
        self.graphs.graph(tokens, step.rows).launch(self._stream)
        self._spin(number)
        result = [array[:samples] for array in self._exchange.results.values()]
        self._scheduler.commit(time.monotonic_ns() // 1000, *result)

    def _spin(self, number: int) -> None:
        """Return when the step has ended; meanwhile poll. Raises DriverError when the GPU has failed."""
        scheduler, exchange = self._scheduler, self._exchange.region
        now = time.monotonic_ns()
        next_poll, next_check = now + POLL_NS, now + GPU_CHECK_NS
        while _atomics.load_acquire(exchange, _RETIRED) != number:
            now = time.monotonic_ns()
            if now >= next_poll:
                scheduler.poll(now // 1000)
                next_poll = now + POLL_NS
            if now >= next_check:
                self._stream.check()
                next_check = now + GPU_CHECK_NS


class _Exchange:
    """Mapped memory through which host and step graph speak.

    Attributes:
        announced: what the next step is; a scalar of ANNOUNCED.
        results: by name, as the core's commit takes them: [rows] and [rows, MAX_TOP_LOGPROBS].
    """

    def __init__(self, rows: int) -> None:
        shapes: dict[str, tuple[DTypeLike, tuple[int, ...]]] = {
            "tokens": (np.int32, (rows,)),
            "logprobs": (np.float32, (rows,)),
            "top_tokens": (np.int32, (rows, MAX_TOP_LOGPROBS)),
            "top_logprobs": (np.float32, (rows, MAX_TOP_LOGPROBS)),
        }
        sizes = {name: -(-4 * int(np.prod(shape)) // 64) * 64 for name, (_, shape) in shapes.items()}
        self.region = allocate_region(_RESULTS + sum(sizes.values()))
        self.announced: NDArray[np.void] = self.region[: ANNOUNCED.itemsize].view(ANNOUNCED).reshape(())
        self.results: dict[str, NDArray[Any]] = {}
        start = _RESULTS
        for name, (dtype, shape) in shapes.items():
            count = int(np.prod(shape))
            self.results[name] = self.region[start : start + 4 * count].view(dtype).reshape(shape)
            start += sizes[name]
        self.mapped = MappedMemory(self.region)
