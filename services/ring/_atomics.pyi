import numpy as np
import numpy.typing as npt

def store_release(region: npt.NDArray[np.uint8], offset: int, value: int) -> None:
    """Store a 64-bit word after every earlier store of this thread. Raises IndexError off the region or unaligned."""

def load_acquire(region: npt.NDArray[np.uint8], offset: int) -> int:
    """Load a 64-bit word before every later load of this thread. Raises IndexError off the region or unaligned."""
