"""The few driver calls that the engine needs: device, memory, streams, graphs, modules and launches.

A thin typed layer over ``cuda.bindings.driver``. Every return code is checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from services.gpu_engine.cuda.errors import CudaUnavailableError, DriverError, OutOfDeviceMemoryError
from services.gpu_engine.cuda.timer_slack import late_timers

try:
    from cuda.bindings import driver as cu
except ImportError as error:
    raise CudaUnavailableError("the cuda engine needs the CUDA libraries: `make cuda` installs them") from error

_DRIVER_THREAD_SECONDS = 2.0  # that its own thread may be woken late: timer_slack.py
ALIGNMENT = 256  # bytes, of every allocation
GRANULE = 2 << 20  # in which the driver hands out large ones
Argument = ctypes._SimpleCData | ctypes.Structure  # type: ignore[type-arg]


def check(call: str, result: tuple[Any, ...]) -> Any:
    """Unwrap a binding's (code, values...) tuple.

    Raises:
        DriverError: the code is not success.
    """
    code, values = result[0], result[1:]
    if int(code) != 0:
        _, description = cu.cuGetErrorString(code)
        raise DriverError(call, code.name, description.decode() if description else "unknown")
    return values[0] if len(values) == 1 else values


class Device:
    """A GPU with its primary context made current on this thread.

    Attributes:
        name: as the driver gives it.
        arch: compiler target, such as ``sm_90a``.
        multiprocessors: their number.

    Raises:
        CudaUnavailableError: there is no driver, or no such device.
    """

    def __init__(self, ordinal: int = 0) -> None:
        with late_timers(_DRIVER_THREAD_SECONDS):
            try:
                check("cuInit", cu.cuInit(0))
                self._device = check("cuDeviceGet", cu.cuDeviceGet(ordinal))
            except (DriverError, RuntimeError) as error:
                raise CudaUnavailableError(f"GPU {ordinal} can't be used: {error}") from error
            self._context = check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(self._device))
        self.make_current()
        self.name = check("cuDeviceGetName", cu.cuDeviceGetName(128, self._device)).split(b"\0")[0].decode()
        attribute = cu.CUdevice_attribute
        major = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
        self.multiprocessors = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)

    def make_current(self) -> None:
        """Make the context current on the calling thread too."""
        check("cuCtxSetCurrent", cu.cuCtxSetCurrent(self._context))

    def _attribute(self, which: Any) -> int:
        return int(check("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(which, self._device)))

    def free_bytes(self) -> int:
        return int(check("cuMemGetInfo", cu.cuMemGetInfo())[0])

    def synchronize(self) -> None:
        check("cuCtxSynchronize", cu.cuCtxSynchronize())


_measured: list[int] | None = None
_carve_out: int | None = None  # see carve_out; None leaves it to the driver, launch by launch


@contextmanager
def measuring() -> Iterator[list[int]]:
    """Buffers made inside take no memory and only add their bytes, as the driver rounds them, to the yielded list."""
    global _measured  # noqa: PLW0603 (the engine starts on one thread)
    found: list[int] = []
    _measured = found
    try:
        yield found
    finally:
        _measured = None
        found[:] = [-(-nbytes // GRANULE) * GRANULE if nbytes > GRANULE else nbytes for nbytes in found]


@contextmanager
def carve_out(percent: int | None) -> Iterator[None]:
    """Kernels looked up inside prefer so much of the first-level cache as shared memory.

    A multiprocessor must be idle to change its division, so kernels in turn with different ones can't follow closely.
    """
    global _carve_out  # noqa: PLW0603 (the engine starts on one thread)
    before, _carve_out = _carve_out, percent
    try:
        yield
    finally:
        _carve_out = before


@contextmanager
def outside_captures() -> Iterator[None]:
    """Calls inside are no part of a capture on this thread, and don't end it.

    Objects die when Python drops them, which may be while a stream is captured; the driver would take a free then for a
    mistake in what is captured, and invalidate that.
    """
    relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    code, previous = cu.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        if int(code) == 0:  # else the context is lost, and nothing is captured
            cu.cuThreadExchangeStreamCaptureMode(previous)


class Buffer:
    """A block of device memory, freed with the object."""

    def __init__(self, nbytes: int, purpose: str = "a buffer") -> None:
        self.nbytes = nbytes
        self.pointer = 0
        if _measured is not None:
            _measured.append(max(nbytes, 1))
            return
        code, pointer = cu.cuMemAlloc(max(nbytes, 1))
        if code == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfDeviceMemoryError(purpose, nbytes, int(check("cuMemGetInfo", cu.cuMemGetInfo())[0]))
        self.pointer = int(check("cuMemAlloc", (code, pointer)))

    @classmethod
    def of(cls, array: NDArray[Any]) -> Buffer:
        """A buffer that holds a copy of ``array``."""
        buffer = cls(array.nbytes)
        buffer.upload(array)
        return buffer

    def upload(self, array: NDArray[Any], offset: int = 0) -> None:
        """Copy ``array`` to ``offset`` bytes into the buffer; returns when it is there."""
        contiguous = np.ascontiguousarray(array)
        if offset + contiguous.nbytes > self.nbytes:
            raise ValueError(f"{contiguous.nbytes} bytes at {offset} do not fit a buffer of {self.nbytes}")
        check("cuMemcpyHtoD", cu.cuMemcpyHtoD(self.pointer + offset, contiguous.ctypes.data, contiguous.nbytes))
        # Up to 64 KiB may still be on their way, and this module's streams don't wait for the default one.
        check("cuStreamSynchronize", cu.cuStreamSynchronize(cu.CUstream(cu.CU_STREAM_LEGACY)))

    def download(self, dtype: DTypeLike, shape: Sequence[int], offset: int = 0) -> NDArray[Any]:
        """Wait for the device and copy out an array that begins ``offset`` bytes into the buffer."""
        array = np.empty(shape, dtype)
        if offset + array.nbytes > self.nbytes:
            raise ValueError(f"{array.nbytes} bytes at {offset} are not in a buffer of {self.nbytes}")
        check("cuCtxSynchronize", cu.cuCtxSynchronize())
        check("cuMemcpyDtoH", cu.cuMemcpyDtoH(array.ctypes.data, self.pointer + offset, array.nbytes))
        return array

    def fill(self, byte: int) -> None:
        if not self.pointer:
            return  # it was only measured
        check("cuMemsetD8", cu.cuMemsetD8(self.pointer, byte, self.nbytes))
        check("cuCtxSynchronize", cu.cuCtxSynchronize())

    def __del__(self) -> None:
        if self.pointer:
            with outside_captures():
                cu.cuMemFree(self.pointer)
            self.pointer = 0


class Graph:
    """An instantiated graph."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._executable = check("cuGraphInstantiate", cu.cuGraphInstantiate(graph, 0))

    def launch(self, stream: Stream) -> None:
        check("cuGraphLaunch", cu.cuGraphLaunch(self._executable, stream.handle))

    def __del__(self) -> None:
        if hasattr(self, "_executable"):
            with outside_captures():
                cu.cuGraphExecDestroy(self._executable)
                cu.cuGraphDestroy(self._graph)


class Stream:
    """A stream that does not synchronize with the legacy default stream.

    Args:
        overlap: kernels that wait for their predecessor themselves may begin before it has ended: all, none, or those
            of these names.
    """

    def __init__(self, *, overlap: bool | Collection[str] = False) -> None:
        self._overlap = overlap
        self.handle = check("cuStreamCreate", cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def overlaps(self, kernel: str) -> bool:
        """Whether a launch of ``kernel`` may begin before what is launched before it has ended."""
        return self._overlap if isinstance(self._overlap, bool) else kernel in self._overlap

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Launches inside may all begin so."""
        before, self._overlap = self._overlap, True
        try:
            yield
        finally:
            self._overlap = before

    def synchronize(self) -> None:
        check("cuStreamSynchronize", cu.cuStreamSynchronize(self.handle))

    def check(self) -> None:
        """Returns at once. Raises DriverError when something that was launched has failed."""
        result = cu.cuStreamQuery(self.handle)
        if result[0] != cu.CUresult.CUDA_ERROR_NOT_READY:
            check("cuStreamQuery", result)

    @contextmanager
    def capture(self) -> Iterator[list[Graph]]:
        """Capture what is launched inside; the yielded list holds the instantiated graph afterwards."""
        graphs: list[Graph] = []
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check("cuStreamBeginCapture", cu.cuStreamBeginCapture(self.handle, mode))
        try:
            yield graphs
        except BaseException:
            cu.cuStreamEndCapture(self.handle)
            raise
        graphs.append(Graph(check("cuStreamEndCapture", cu.cuStreamEndCapture(self.handle))))

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            with outside_captures():
                cu.cuStreamDestroy(self.handle)


class Timer:
    """Device time between two points of a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._events = [check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(2)]

    def start(self) -> None:
        check("cuEventRecord", cu.cuEventRecord(self._events[0], self._stream.handle))

    def end(self) -> None:
        check("cuEventRecord", cu.cuEventRecord(self._events[1], self._stream.handle))

    def seconds(self) -> float:
        """Between ``start`` and ``end``; waits for the device."""
        check("cuEventSynchronize", cu.cuEventSynchronize(self._events[1]))
        return float(check("cuEventElapsedTime", cu.cuEventElapsedTime(*self._events))) / 1e3

    def stop(self) -> float:
        """``end`` and ``seconds``."""
        self.end()
        return self.seconds()

    def __del__(self) -> None:
        with outside_captures():
            for event in getattr(self, "_events", []):
                cu.cuEventDestroy(event)


class Kernel:
    """One entry point of a module, which stays loaded as long as the kernel is there.

    Args:
        waits: it waits for the kernel before it itself (kernels/dependent_launch.cuh), so it may begin earlier.
    """

    def __init__(self, module: Module, function: Any, name: str, *, waits: bool = False) -> None:
        self._module = module
        self._function = function
        self.name = name
        self._waits = waits

    def launch(
        self,
        stream: Stream,
        grid: tuple[int, int, int],
        block: int,
        arguments: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        """Launch with ``arguments`` in the kernel's order, each exactly of the parameter's C type."""
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream = shared_bytes, stream.handle
        if self._waits and stream.overlaps(self.name):
            config.attrs, config.numAttrs = [_overlap_attribute()], 1
        result = cu.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0)
        check(f"launch of {self.name}", result)

    def allow_shared(self, shared_bytes: int) -> None:
        """Raise the limit of dynamic shared memory above 48 KiB."""
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check("cuFuncSetAttribute", cu.cuFuncSetAttribute(self._function, limit, shared_bytes))

    def blocks_per_multiprocessor(self, block: int, shared_bytes: int = 0) -> int:
        call = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, block, shared_bytes)
        return int(check("cuOccupancyMaxActiveBlocksPerMultiprocessor", call))


class Module:
    """A loaded cubin."""

    def __init__(self, cubin: bytes) -> None:
        self._module = check("cuModuleLoadData", cu.cuModuleLoadData(cubin))

    def kernel(self, name: str, *, waits: bool = False) -> Kernel:
        """An entry point; for ``waits`` see Kernel."""
        function = check(f"lookup of {name}", cu.cuModuleGetFunction(self._module, name.encode()))
        if _carve_out is not None:
            preferred = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            check("cuFuncSetAttribute", cu.cuFuncSetAttribute(function, preferred, _carve_out))
        return Kernel(self, function, name, waits=waits)

    def constant(self, name: str, dtype: DTypeLike = np.uint32) -> Any:
        """The value of a ``__device__`` scalar."""
        pointer, nbytes = check(f"lookup of {name}", cu.cuModuleGetGlobal(self._module, name.encode()))
        value = np.empty(1, dtype)
        if value.nbytes != nbytes:
            raise ValueError(f"{name} has {nbytes} bytes, {np.dtype(dtype)} has {value.nbytes}")
        check("cuMemcpyDtoH", cu.cuMemcpyDtoH(value.ctypes.data, pointer, nbytes))
        return value[0]

    def __del__(self) -> None:
        if hasattr(self, "_module"):
            with outside_captures():
                cu.cuModuleUnload(self._module)


def _overlap_attribute() -> Any:
    value = cu.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value = value
    return attribute


def pointer(buffer: Buffer | int, offset: int = 0) -> ctypes.c_uint64:
    """A kernel argument: an address ``offset`` bytes into a buffer."""
    return ctypes.c_uint64((buffer.pointer if isinstance(buffer, Buffer) else buffer) + offset)
