"""Host memory that the GPU reads and writes in place: pinned and mapped."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cu
from numpy.typing import NDArray

from services.gpu_engine.cuda.driver import check
from services.ring.memory import Region


class MappedMemory:
    """Memory of this process, pinned and mapped so that the GPU works on the very same pages.

    Of a shared-memory ring: gateways that map the file, and bootstrap, go on as if no GPU were there.

    Args:
        region: begins on a page.

    Attributes:
        pointer: of the region, as the GPU sees it.

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

    def address(self, array: NDArray[Any]) -> int:
        """Where the GPU sees ``array``, which lies in the region."""
        offset = array.ctypes.data - self._region.ctypes.data
        if not 0 <= offset <= self._region.nbytes - array.nbytes:
            raise ValueError(
                f"an array of {array.nbytes} bytes at {offset} is not in these {self._region.nbytes} bytes"
            )
        return self.pointer + offset

    def close(self) -> None:
        """Unpin the memory. The GPU must no longer work on it."""
        if self._registered:
            self._registered = False
            cu.cuMemHostUnregister(self._region.ctypes.data)

    def __del__(self) -> None:
        self.close()
