"""Products of at most 64 tokens, as streams of the weights: the launches of kernels/skinny_gemm.cu.

Each takes the tensor maps of its two operands and the shape of its tiles. All launches may overlap with the kernel
before them (kernels/dependent_launch.cuh).
"""

from __future__ import annotations

import ctypes

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Device, Module, Stream, pointer
from services.gpu_engine.cuda.geometry import BF16_BYTES
from services.gpu_engine.cuda.skinny_schedule import DEPTH, MOST_SHARED_BYTES, WIDTHS, Schedule, schedules
from services.gpu_engine.cuda.tensor_map import CTensorMap, cached_gated_map, cached_map

MOST_TOKENS = WIDTHS[-1]
THREADS = 288
KERNELS = ("skinny_store", "skinny_logits", "skinny_swiglu")


class CProblem(ctypes.Structure):
    """``blink::Problem``."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("tokens", "outputs", "rows", "run", "chunks", "stages"))


class SkinnyGemm:
    """The kernels, one build for each of WIDTHS.

    All matrices are row-major bf16 with a multiple of 8 columns, at addresses that are multiples of 16.

    Args:
        multiprocessors: to share the weights between; one less than the GPU's, the control loop has one.
    """

    def __init__(self, device: Device, compiler: Compiler, multiprocessors: int | None = None) -> None:
        self.multiprocessors = multiprocessors or device.multiprocessors - 1
        modules = {w: Module(compiler.build(("skinny_gemm.cu",), {"BLINK_SKINNY_TOKENS": w})) for w in WIDTHS}
        self._kernels = {(w, name): modules[w].kernel(name, waits=True) for w in WIDTHS for name in KERNELS}
        for kernel in self._kernels.values():
            kernel.allow_shared(MOST_SHARED_BYTES)

    def matmul(
        self,
        stream: Stream,
        x: int,
        weight: int,
        out: int,
        *,
        m: int,
        n: int,
        k: int,
        fp32_out: bool = False,
        schedule: Schedule | None = None,
    ) -> None:
        """Launch out[m, n] = x[m, k] @ weight[n, k]^T; all addresses of device memory.

        Args:
            m: tokens, 1 to 64.
            fp32_out: ``out`` is float32, and n may be any number; else bf16.
            schedule: instead of the first of ``schedules``.

        Raises:
            ValueError: too many tokens.
            DriverError: the launch failed.
        """
        plan = schedule or schedules(n, self.multiprocessors)[0]
        weight_map = cached_map(weight, (k, n), (BF16_BYTES * k,), (DEPTH, plan.rows))
        kernel = "skinny_logits" if fp32_out else "skinny_store"
        self._launch(stream, kernel, plan, (x, out), weight_map, weight_rows=n, m=m, n=n, k=k)

    def swiglu(
        self,
        stream: Stream,
        x: int,
        weight: int,
        out: int,
        *,
        m: int,
        n: int,
        k: int,
        schedule: Schedule | None = None,
    ) -> None:
        """Launch out[m, n] = silu(x @ gate^T) * (x @ up^T), ``weight`` being gate over up, [2 n, k].

        Bit for bit what ``matmul`` and kernels/swiglu.cu make of it. Raises as ``matmul``.
        """
        plan = schedule or schedules(2 * n, self.multiprocessors)[0]
        weight_map = cached_gated_map(weight, n, k, (DEPTH, plan.rows))
        self._launch(stream, "skinny_swiglu", plan, (x, out), weight_map, weight_rows=2 * n, m=m, n=n, k=k)

    def _launch(
        self,
        stream: Stream,
        name: str,
        plan: Schedule,
        operands: tuple[int, int],
        weight: CTensorMap,
        *,
        weight_rows: int,
        m: int,
        n: int,
        k: int,
    ) -> None:
        width = width_of(m)
        x, out = operands
        problem = CProblem(
            tokens=m,
            outputs=n,
            rows=plan.rows,
            run=plan.run,
            chunks=-(-k // DEPTH),
            stages=plan.stages(width),
        )
        x_map = cached_map(x, (k, m), (BF16_BYTES * k,), (DEPTH, width))
        self._kernels[width, name].launch(
            stream,
            (plan.blocks(weight_rows), 1, 1),
            THREADS,
            (weight, x_map, problem, pointer(out)),
            plan.shared_bytes(width),
        )


def width_of(tokens: int) -> int:
    """The narrowest of WIDTHS that holds so many tokens. Raises ValueError: none does."""
    for width in WIDTHS:
        if tokens <= width:
            return width
    raise ValueError(f"a product of m={tokens} has more than {MOST_TOKENS} tokens")
