"""The ring where the GPU can reach it: the shared-memory ring itself, pinned and mapped."""

from __future__ import annotations

from cuda.bindings import driver as cu

from services.gpu_engine.cuda.driver import check
from services.ring.memory import Region


class MappedRing:
    """A ring in this process's memory, pinned and mapped so that the GPU polls and writes the very same pages.

    Gateways that map the file, and bootstrap, go on as if no GPU were there.

    Attributes:
        pointer: of the ring, as the GPU sees it.

    Raises:
        DriverError: the memory can't be pinned.
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
