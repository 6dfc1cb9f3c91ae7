"""When each step begins and ends on the GPU, for a bench: two tiny kernels around the step's own, 1 µs each."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.cuda.compiler import Compiler, default_cache
from services.gpu_engine.cuda.driver import Buffer, Device, Module, Stream, pointer
from services.gpu_engine.cuda.graph_cache import Record

SOURCE = "bench/step_times.cu"
TIMES = np.dtype([("begin", "<u8"), ("end", "<u8")])


class StepTimes:
    """Nanoseconds of the GPU's global timer for the last ``kept`` steps."""

    def __init__(self, kept: int = 1 << 16) -> None:
        self._kept = kept
        self._module = Module(Compiler(Device().arch, default_cache()).build((SOURCE,), {}))
        self._times = Buffer.of(np.zeros(kept, TIMES).view(np.uint8))
        self._number = Buffer.of(np.zeros(1, np.uint64))

    def around(self, record: Record) -> Record:
        """``record`` between the two kernels."""
        arguments = (pointer(self._times), pointer(self._number), ctypes.c_uint64(self._kept))

        def timed(stream: Stream, bucket: int) -> None:
            self._module.kernel("step_begins").launch(stream, (1, 1, 1), 1, arguments)
            record(stream, bucket)
            self._module.kernel("step_ends").launch(stream, (1, 1, 1), 1, arguments)

        return timed

    def read(self) -> NDArray[np.void]:
        """[kept] of TIMES; step n, counted from 1, lies at (n - 1) % kept. Only after the loop's end."""
        return self._times.download(TIMES, (self._kept,))


def gaps_us(times: NDArray[np.void], first: int, last: int) -> NDArray[np.float64]:
    """From the end of each of the steps ``first`` to ``last`` - 1 to the beginning of the next, in µs."""
    steps = times[np.arange(first - 1, last) % times.size]
    between: NDArray[np.float64] = (steps["begin"][1:].astype(np.int64) - steps["end"][:-1].astype(np.int64)) / 1e3
    return between
