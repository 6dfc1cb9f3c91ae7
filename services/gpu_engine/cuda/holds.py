"""Kernels that wait for a word of the host's, for measurements under the conditions of serving."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Module, Stream, pointer
from services.gpu_engine.cuda.mapped_memory import MappedMemory

_QUEUEING_NS = 50_000_000  # what takes longer to queue begins before it is whole
_OCCUPYING_NS = 5_000_000_000
_LOOP_THREADS, _LOOP_SHARED_BYTES = 256, 16 << 10  # about what the control loop takes of its multiprocessor


class Holds:
    """While one is held nothing on the host may make the device wait: no allocation, no first use of a kernel."""

    def __init__(self, compiler: Compiler) -> None:
        self._kernel = Module(compiler.build(("hold.cu",), {})).kernel("hold")
        region = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self._words = region.view(np.uint32)
        self._mapped = MappedMemory(region)
        self._beside = Stream()

    @contextmanager
    def occupied_multiprocessor(self) -> Iterator[None]:
        """One multiprocessor less, as while the control loop runs."""
        self._launch(self._beside, 0, _OCCUPYING_NS, _LOOP_THREADS, _LOOP_SHARED_BYTES)
        try:
            yield
        finally:
            self._words[0] = 1
            self._beside.synchronize()

    @contextmanager
    def queued_whole(self, stream: Stream) -> Iterator[None]:
        """What is launched inside begins when all of it is launched."""
        self._launch(stream, 1, _QUEUEING_NS, 1, 0)
        try:
            yield
        finally:
            self._words[1] = 1

    def _launch(self, stream: Stream, word: int, limit_ns: int, threads: int, shared_bytes: int) -> None:
        self._words[word] = 0
        arguments = (pointer(self._mapped.pointer, 4 * word), ctypes.c_uint64(limit_ns))
        self._kernel.launch(stream, (1, 1, 1), threads, arguments, shared_bytes)

    def close(self) -> None:
        self._mapped.close()
