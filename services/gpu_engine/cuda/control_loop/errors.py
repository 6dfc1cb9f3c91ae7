"""What can go wrong with the control loop and its graphs."""

from __future__ import annotations

from services.gpu_engine.cuda.errors import CudaError


class GraphCacheError(CudaError):
    """A step can't be captured as a graph that the GPU launches by itself; the message names the bucket and why."""


class ControlLoopError(CudaError):
    """The control loop has ended by itself, or never came up."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code  # CUDA's, as in the ring's EngineStatus.failure; 0 for another cause
