"""The ring where the GPU reaches it: in host memory, in its own, or half and half.

| place | gateways write to | gateways read from | bootstrap reaches the header |
|---|---|---|---|
| host | host memory, which the GPU polls over PCIe | host memory | in place |
| device | GPU memory | GPU memory, over PCIe | by copies |
| split | GPU memory, which the GPU polls at home | host memory, which the GPU writes over PCIe | by copies |
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Literal

import numpy as np
from cuda.bindings import driver as cu

from services.gpu_engine.cuda.driver import Buffer, Device, Stream, check
from services.gpu_engine.cuda.mapped_memory import MappedMemory
from services.gpu_engine.engine import MovedRing
from services.ring.errors import TransportLostError
from services.ring.memory import MemoryTransport, Region
from services.ring.parts import DmaBufPart, HostPart
from services.ring.schema import RingGeometry
from services.ring.transport import Transport

RingPlace = Literal["host", "device", "split"]
_EXPORT_GRANULE = 1 << 16  # the driver exports whole pages of at most this size
_STAGING_BYTES = 1 << 16


class GpuRing:
    """A formatted ring, moved to ``place``. Make it before the control loop runs: it allocates.

    Attributes:
        pointer: of the ring, as the GPU sees it.
        outbound: of all lanes' outbound areas, as the GPU sees them.
        transport: the host's way to the ring, with "split" to its header and inbound areas alone.

    Raises:
        DriverError: the memory can't be pinned.
        OutOfDeviceMemoryError
    """

    def __init__(self, device: Device, region: Region, geometry: RingGeometry, place: RingPlace) -> None:
        self._region = region
        self._geometry = geometry
        self._place = place
        start = geometry.outbound_offset
        self._device_part: DevicePart | None = None
        self._mapped: MappedMemory | None = None
        if place != "device":
            self._mapped = MappedMemory(region if place == "host" else region[start:])
        if place == "host":
            assert self._mapped is not None
            self.pointer = self._mapped.pointer
            self.outbound = self.pointer + start
            self.transport: Transport = MemoryTransport(region)
            return
        self._device_part = part = DevicePart(region if place == "device" else region[:start])
        self.pointer = part.pointer
        self.outbound = part.pointer + start if self._mapped is None else self._mapped.pointer
        self.transport = DeviceTransport(device, part)

    def moved(self) -> MovedRing | None:
        """What bootstrap must know of a ring that is not in its region. Raises DriverError: no dma-buf to be had."""
        if self._device_part is None:
            return None
        parts: list[DmaBufPart | HostPart] = [DmaBufPart(0, self._device_part.size, self._device_part.dma_buf())]
        if self._place == "split":
            start = self._geometry.outbound_offset
            parts.append(HostPart(start, self._region[start:]))
        return MovedRing(self.transport, parts)

    def close(self) -> None:
        """Free and unpin. The control loop must have ended, and no NIC may have any of it registered."""
        self.transport.close()
        if self._device_part is not None:
            self._device_part.close()
        if self._mapped is not None:
            self._mapped.close()


class DevicePart:
    """A copy in GPU memory of a ring's beginning, or of all of it."""

    def __init__(self, region: Region) -> None:
        self.size = region.nbytes
        exported = -(-self.size // _EXPORT_GRANULE) * _EXPORT_GRANULE
        self._buffer = Buffer(exported, "the ring")  # cuMemAlloc's blocks of this size begin on such a page
        self._buffer.upload(region)
        self.pointer = self._buffer.pointer
        self._fd = -1

    def dma_buf(self) -> int:
        """A descriptor of the memory, to be registered with a NIC; closed by ``close``.

        Raises DriverError when driver or GPU can't export it.
        """
        if self._fd < 0:
            kind = cu.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
            result = cu.cuMemGetHandleForAddressRange(self.pointer, self._buffer.nbytes, kind, 0)
            self._fd = int(check("cuMemGetHandleForAddressRange (dma-buf)", result))
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._buffer = Buffer(0)


class DeviceTransport(Transport):
    """Loads and stores of a DevicePart by the copy engine, on a stream of its own, beside the running control loop.

    Through pinned memory, so that no copy waits for more than itself. May be used by several threads.
    """

    def __init__(self, device: Device, part: DevicePart) -> None:
        super().__init__(part.size)
        self._device = device
        self._pointer = part.pointer
        self._stream = Stream()
        self._lock = threading.Lock()
        self._staging = int(check("cuMemHostAlloc", cu.cuMemHostAlloc(_STAGING_BYTES, cu.CU_MEMHOSTALLOC_PORTABLE)))
        self._view = np.ctypeslib.as_array((ctypes.c_uint8 * _STAGING_BYTES).from_address(self._staging))

    def write(self, offset: int, data: bytes, *, flag: bool = False) -> None:
        if flag and (len(data) != 8 or offset % 8):
            raise IndexError(f"a flag is one aligned word of 8 bytes, got {len(data)} at {offset}")
        with self._lock:
            self._open(offset, len(data))
            for done in range(0, len(data), _STAGING_BYTES):
                part = data[done : done + _STAGING_BYTES]
                self._view[: len(part)] = np.frombuffer(part, np.uint8)
                target = self._pointer + offset + done
                check("copy", cu.cuMemcpyHtoDAsync(target, self._staging, len(part), self._stream.handle))
                self._stream.synchronize()
            self.counters.writes += 1
            self.counters.written_bytes += len(data)

    def read(self, offset: int, length: int) -> bytes:
        with self._lock:
            self._open(offset, length)
            parts = []
            for done in range(0, length, _STAGING_BYTES):
                size = min(_STAGING_BYTES, length - done)
                source = self._pointer + offset + done
                check("copy", cu.cuMemcpyDtoHAsync(self._staging, source, size, self._stream.handle))
                self._stream.synchronize()
                parts.append(self._view[:size].tobytes())
            self.counters.reads += 1
            self.counters.read_bytes += length
            return b"".join(parts)

    def flush(self) -> None:
        with self._lock:
            self._open(0, 0)  # every write was waited for

    def close(self) -> None:
        with self._lock:
            if self._staging:
                cu.cuMemFreeHost(self._staging)
                self._staging = 0

    def _open(self, offset: int, length: int) -> None:
        if not self._staging:
            raise TransportLostError("the transport is closed")
        if not 0 <= offset <= self.size - length:
            raise IndexError(f"{length} bytes at {offset} leave the {self.size} bytes in GPU memory")
        self._device.make_current()
