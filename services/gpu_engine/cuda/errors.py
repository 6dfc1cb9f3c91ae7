"""What can go wrong on a GPU."""

from __future__ import annotations

from services.common.errors import BlinkError


class CudaError(BlinkError):
    """Base of all errors of this package."""


class CudaUnavailableError(CudaError):
    """No usable GPU, driver or CUDA library; the message says which and what to install."""


class DriverError(CudaError):
    """A call of the driver or of a CUDA library failed."""

    def __init__(self, call: str, name: str, description: str) -> None:
        super().__init__(f"{call} failed with {name}: {description}")
        self.call, self.name = call, name


class OutOfDeviceMemoryError(CudaError):
    """The GPU has too little free memory.

    Attributes:
        needed, free: bytes.
    """

    def __init__(self, purpose: str, needed: int, free: int, advice: str = "") -> None:
        advice = advice or "lower kv_tokens, max_batched_tokens, max_running or lanes"
        super().__init__(
            f"{purpose} needs {needed / 2**20:,.0f} MiB of GPU memory, {free / 2**20:,.0f} MiB are free:"
            f" stop other users of the GPU, or {advice}"
        )
        self.needed, self.free = needed, free


class KernelBuildError(CudaError):
    """A kernel source did not compile or link; the message holds the compiler's log."""


class UnsupportedGeometryError(CudaError):
    """The kernels can't run a model of this shape; the message names the number and what is supported."""
