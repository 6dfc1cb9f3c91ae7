"""The ring where the GPU can reach it: the shared-memory ring itself, mapped, or device memory for RDMA."""

from __future__ import annotations

import ctypes
import os
from typing import Literal

import numpy as np
from cuda.bindings import driver as cu

from services.gpu_engine.cuda.driver import Buffer, Stream, check
from services.gpu_engine.cuda.errors import DriverError
from services.ring.errors import TransportLostError
from services.ring.memory import Region
from services.ring.transport import Transport

RingPlace = Literal["mapped", "device"]


class MappedRing:
    """A ring in this process's memory, pinned and mapped so that the GPU polls and writes the very same pages.

    Gateways that map the file, and bootstrap, go on as if no GPU were there.

    Attributes:
        pointer: of the ring, as the GPU sees it.
    """

    def __init__(self, region: Region) -> None:
        self._region = region  # keeps the mapping alive
        self._registered = False
        flags = cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP
        address = region.ctypes.data
        check(f"cuMemHostRegister of {region.nbytes} bytes", cu.cuMemHostRegister(address, region.nbytes, flags))
        self._registered = True
        self.pointer = int(check("cuMemHostGetDevicePointer", cu.cuMemHostGetDevicePointer(address, 0)))

    def close(self) -> None:
        """Unpin the memory. The control loop must have ended."""
        if self._registered:
            self._registered = False
            cu.cuMemHostUnregister(self._region.ctypes.data)


class DeviceRing:
    """A ring in GPU memory, for gateways that reach it by RDMA. ``region`` is its formatted beginning.

    Attributes:
        pointer: of the ring, as the GPU sees it.
    """

    def __init__(self, region: Region) -> None:
        self.buffer = Buffer.of(region)
        self.pointer = self.buffer.pointer

    def dma_buf(self) -> int:
        """A file descriptor of the memory, to be registered with an RDMA NIC; the caller closes it.

        Raises DriverError when driver or GPU can't export it.
        """
        # The driver exports whole 64 KiB pages; cuMemAlloc's blocks of this size start on one.
        granule = 1 << 16
        size = -(-self.buffer.nbytes // granule) * granule
        kind = cu.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        handle = ctypes.c_int(-1)
        result = cu.cuMemGetHandleForAddressRange(ctypes.addressof(handle), self.pointer, size, kind, 0)
        check("cuMemGetHandleForAddressRange", result)
        return handle.value

    def close(self) -> None:
        """Free the memory. The control loop must have ended, and no NIC may still have it registered."""
        self.buffer = Buffer(0)


class DeviceTransport(Transport):
    """Bootstrap's way to a ring in device memory: copies on a stream of its own, beside the running control loop."""

    def __init__(self, ring: DeviceRing) -> None:
        super().__init__(ring.buffer.nbytes)
        self._ring: DeviceRing | None = ring
        self._stream = Stream()

    def write(self, offset: int, data: bytes, *, flag: bool = False) -> None:
        if flag and len(data) != 8:
            raise IndexError(f"a flag is 8 bytes, got {len(data)}")
        address = self._at(offset, len(data))
        source = np.frombuffer(data, np.uint8)
        check("cuMemcpyHtoDAsync", cu.cuMemcpyHtoDAsync(address, source.ctypes.data, len(data), self._stream.handle))
        self._stream.synchronize()
        self.counters.writes += 1
        self.counters.written_bytes += len(data)

    def read(self, offset: int, length: int) -> bytes:
        address = self._at(offset, length)
        target = np.empty(length, np.uint8)
        check("cuMemcpyDtoHAsync", cu.cuMemcpyDtoHAsync(target.ctypes.data, address, length, self._stream.handle))
        self._stream.synchronize()
        self.counters.reads += 1
        self.counters.read_bytes += length
        return target.tobytes()

    def flush(self) -> None:
        self._at(0, 0)  # every write was waited for

    def close(self) -> None:
        self._ring = None

    def _at(self, offset: int, length: int) -> int:
        if self._ring is None:
            raise TransportLostError("the transport is closed")
        if not 0 <= offset <= self.size - length:
            raise IndexError(f"{length} bytes at {offset} leave the ring of {self.size}")
        return self._ring.pointer + offset


def place_ring(region: Region, place: RingPlace) -> MappedRing | DeviceRing:
    """Bring a formatted ring to where the GPU reaches it.

    Raises:
        DriverError: the memory can't be pinned, for example because RLIMIT_MEMLOCK is too low.
    """
    if place == "device":
        return DeviceRing(region)
    try:
        return MappedRing(region)
    except DriverError as error:
        raise DriverError(
            error.call, error.name, f"the ring's {region.nbytes} bytes can't be pinned for the GPU (pid {os.getpid()})"
        ) from error
