"""Compiles the control loop, with the scheduling core in it, for the GPU."""

from __future__ import annotations

from pathlib import Path

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.errors import CudaUnavailableError

SOURCE = "services/gpu_engine/cuda/control_loop/control_loop.cu"
THREADS = 256  # measured: docs/performance.md, "Control loop"


def build_control_loop(arch: str, cache: Path | None, *, threads: int = THREADS, trace: bool = False) -> bytes:
    """The control loop's cubin.

    Args:
        threads: of its block: whole warps, at most 1,024.
        trace: keep each step's times (``StepTrace`` of loop.cuh).

    Raises:
        KernelBuildError: with the compiler's log.
    """
    compiler = Compiler(arch, cache)
    defines = {"BLINK_LOOP_THREADS": threads, "BLINK_TRACE": int(trace)}
    return compiler.build((SOURCE,), defines, (device_runtime(),))


def device_runtime() -> Path:
    """libcudadevrt.a of the installed CUDA libraries; device-side graph launch lives there."""
    import nvidia  # noqa: PLC0415

    for root in map(Path, nvidia.__path__):
        for path in (*root.glob("cu*/lib/libcudadevrt.a"), *root.glob("cuda_runtime/lib/libcudadevrt.a")):
            return path
    raise CudaUnavailableError("libcudadevrt.a is missing: `make cuda` installs nvidia-cuda-runtime")
