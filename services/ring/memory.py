"""A transport over memory that this process can address."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.ring import _atomics
from services.ring.errors import TransportLostError
from services.ring.schema import AREA_ALIGNMENT
from services.ring.transport import Transport

Region = npt.NDArray[np.uint8]


def allocate_region(size: int) -> Region:
    """Zeroed private memory that starts on a page, as every ring does."""
    raw = np.zeros(size + AREA_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % AREA_ALIGNMENT
    return raw[start : start + size]


class MemoryTransport(Transport):
    """Loads and stores; ``region`` holds the ring from its start."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.size)
        self._region: Region | None = region

    def write(self, offset: int, data: bytes, *, flag: bool = False) -> None:
        region = self._open_region()
        if flag:
            if len(data) != 8:
                raise IndexError(f"a flag is 8 bytes, got {len(data)}")
            _atomics.store_release(region, offset, int.from_bytes(data, "little"))
        else:
            _atomics.store(region, offset, data)
        self.counters.writes += 1
        self.counters.written_bytes += len(data)

    def read(self, offset: int, length: int) -> bytes:
        data = _atomics.load(self._open_region(), offset, length)
        self.counters.reads += 1
        self.counters.read_bytes += length
        return data

    def flush(self) -> None:
        self._open_region()  # every store is already on its way: memory is coherent

    def close(self) -> None:
        self._region = None

    def _open_region(self) -> Region:
        if self._region is None:
            raise TransportLostError("the transport is closed")
        return self._region
