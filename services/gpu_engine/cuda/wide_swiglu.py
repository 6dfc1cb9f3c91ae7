"""Gate-up products of many tokens with SwiGLU in their wake: the launches of kernels/wide_swiglu.cu."""

from __future__ import annotations

import ctypes

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Device, Module, Stream, pointer
from services.gpu_engine.cuda.geometry import BF16_BYTES
from services.gpu_engine.cuda.skinny_schedule import ratio_up
from services.gpu_engine.cuda.tensor_map import cached_gated_map, cached_map
from services.gpu_engine.cuda.wide_schedule import CLUSTER, DEPTH, SHARED_BYTES, TILES, WidePlan, WideTile

THREADS = 384
KERNEL = "wide_swiglu"


class CWideProblem(ctypes.Structure):
    """``blink::WideProblem``."""

    _fields_ = tuple(
        (name, ctypes.c_uint32) for name in ("tokens", "outputs", "chunks", "token_pairs", "row_pairs", "same_rows")
    )


class WideSwiglu:
    """The kernel, one build for each of TILES.

    All matrices are row-major bf16 with a multiple of 8 columns, at addresses that are multiples of 16.

    Args:
        multiprocessors: to share the tiles between; one less than the GPU's, the control loop has one.
    """

    def __init__(self, device: Device, compiler: Compiler, multiprocessors: int | None = None) -> None:
        self.multiprocessors = multiprocessors or device.multiprocessors - 1
        self._kernels = {
            tile: Module(compiler.build(("wide_swiglu.cu",), tile.defines)).kernel(KERNEL, waits=True) for tile in TILES
        }
        for kernel in self._kernels.values():
            kernel.allow_shared(SHARED_BYTES)

    def launch(self, stream: Stream, x: int, weight: int, out: int, *, m: int, n: int, k: int, tile: WideTile) -> None:
        """Launch out[m, n] = silu(x @ gate^T) * (x @ up^T), ``weight`` being gate over up, [2 n, k].

        All addresses are of device memory. Bit for bit what the skinny kernel gives, and what a product in its order of
        summation and kernels/swiglu.cu make of it.

        Raises:
            DriverError: the launch failed.
        """
        weight_map = cached_gated_map(weight, n, k, (DEPTH, tile.rows // CLUSTER))
        x_map = cached_map(x, (k, m), (BF16_BYTES * k,), (DEPTH, tile.tokens // CLUSTER))
        plan = WidePlan.of(tile, m, 2 * n)
        problem = CWideProblem(
            tokens=m,
            outputs=n,
            chunks=ratio_up(k, DEPTH),
            token_pairs=plan.token_pairs,
            row_pairs=plan.row_pairs,
            same_rows=plan.same_rows,
        )
        grid = (CLUSTER * plan.clusters(self.multiprocessors), 1, 1)
        arguments = (weight_map, x_map, problem, pointer(out))
        self._kernels[tile].launch(stream, grid, THREADS, arguments, SHARED_BYTES)
