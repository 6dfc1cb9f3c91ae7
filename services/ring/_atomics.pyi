import numpy as np
import numpy.typing as npt

def store_release(region: npt.NDArray[np.uint8], offset: int, value: int) -> None:
    """Store a 64-bit word after every earlier store of this thread. Raises IndexError off the region or unaligned."""

def load_acquire(region: npt.NDArray[np.uint8], offset: int) -> int:
    """Load a 64-bit word before every later load of this thread. Raises IndexError off the region or unaligned."""

def store(region: npt.NDArray[np.uint8], offset: int, data: bytes) -> None:
    """Copy bytes in without tearing an aligned 64-bit word; no order. Raises IndexError off the region."""

def load(region: npt.NDArray[np.uint8], offset: int, length: int) -> bytes:
    """Copy bytes out without tearing an aligned 64-bit word, before every later load of this thread.

    Raises IndexError off the region.
    """
