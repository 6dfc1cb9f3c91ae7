"""Products of FP8 weights: what a bf16 product of the dequantized weights gives, from half the bytes.

Up to 64 tokens by kernels/skinny_fp8.cu, up to MOST_TOKENS by several launches of it, each over 64 tokens; more by
products.py, over weights that kernels/dequantize_fp8.cu leaves in bf16 just before (docs/decisions/0020-fp8.md has the
arithmetic). Weights are the same bf16 numbers in each, and sums run in the engine's one order (products.py).
"""

from __future__ import annotations

import ctypes
from ctypes import c_uint32

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Device, Module, Stream, pointer
from services.gpu_engine.cuda.fp8_matrix import SCALE_COLUMNS, Fp8Matrix
from services.gpu_engine.cuda.geometry import BF16_BYTES
from services.gpu_engine.cuda.products import MatrixProducts
from services.gpu_engine.cuda.skinny_gemm import THREADS, CProblem, width_of
from services.gpu_engine.cuda.skinny_schedule import MOST_SHARED_BYTES, WIDTHS, Schedule, schedules
from services.gpu_engine.cuda.tensor_map import CTensorMap, cached_map

DEPTH = SCALE_COLUMNS  # columns of a stage: kFp8Depth
X_COLUMNS = 64  # of a box of activations
PASS_TOKENS = WIDTHS[-1]
MOST_TOKENS = 4 * PASS_TOKENS
"""Beyond, streaming the codes once for each 64 tokens costs more than dequantizing them once."""
DEQUANTIZE_BLOCK, DEQUANTIZE_COLUMNS = 256, 16  # threads, and columns of a thread
KERNELS = ("skinny_fp8_store", "skinny_fp8_swiglu")


class CFp8Matrix(ctypes.Structure):
    """``blink::Fp8Matrix``."""

    _fields_ = (("codes", ctypes.c_uint64), ("scales", ctypes.c_uint64), ("block_stride", ctypes.c_uint64))


class Fp8Products:
    """Launches products of FP8 matrices.

    Args:
        products: multiplies by dequantized weights.
        scratch: bf16 room for the largest matrix, see ``scratch_bytes``.
        multiprocessors: to share the weights between; one less than the GPU's, the control loop has one.
    """

    def __init__(
        self,
        device: Device,
        compiler: Compiler,
        products: MatrixProducts,
        scratch: Buffer,
        multiprocessors: int | None = None,
    ) -> None:
        self._products = products
        self.scratch = scratch
        self._multiprocessors = multiprocessors or device.multiprocessors - 1
        modules = {w: Module(compiler.build(("skinny_fp8.cu",), {"BLINK_SKINNY_TOKENS": w})) for w in WIDTHS}
        self._kernels = {(w, name): modules[w].kernel(name, waits=True) for w in WIDTHS for name in KERNELS}
        for kernel in self._kernels.values():
            kernel.allow_shared(MOST_SHARED_BYTES)
        self._dequantize = Module(compiler.build(("dequantize_fp8.cu",), {})).kernel("dequantize_fp8", waits=True)

    def matmul(self, stream: Stream, x: int, weight: Fp8Matrix, out: int, *, m: int, n: int, k: int) -> None:
        """Launch out[m, n] = x[m, k] @ weight[n, k]^T; x and out are bf16, row-major.

        Raises:
            DriverError: the launch failed.
        """
        if m > MOST_TOKENS:
            dequantized = self.dequantize(stream, weight, rows=n, columns=k)
            self._products.matmul(stream, x, dequantized, out, m=m, n=n, k=k)
            return
        plan = schedules(n, self._multiprocessors)[0]
        weight_map = cached_map(weight.codes, (k // 2, n), (k,), (DEPTH // 2, plan.rows))  # in pairs of codes
        self._launch(stream, "skinny_fp8_store", (x, out), weight, weight_map, plan=plan, weight_rows=n, m=m, n=n, k=k)

    def fuses_swiglu(self, m: int) -> bool:
        """Whether ``swiglu`` can be used for so many tokens."""
        return m <= MOST_TOKENS or self._products.fuses_swiglu(m)

    def swiglu(self, stream: Stream, x: int, weight: Fp8Matrix, out: int, *, m: int, n: int, k: int) -> None:
        """Launch out[m, n] = silu(x @ gate^T) * (x @ up^T), ``weight`` [2 n, k] being gate over up.

        Bit for bit what ``matmul`` and the SwiGLU kernel make of it.
        """
        if m > MOST_TOKENS:
            dequantized = self.dequantize(stream, weight, rows=2 * n, columns=k)
            self._products.swiglu(stream, x, dequantized, out, m=m, n=n, k=k)
            return
        plan = schedules(2 * n, self._multiprocessors)[0]
        shape, strides = (k // 2, 8, 2, n // 8), (k, n * k, 8 * k)  # rows of eight, the gate's and up's in turn
        weight_map = cached_map(weight.codes, shape, strides, (DEPTH // 2, 8, 2, plan.rows // 16))
        self._launch(
            stream, "skinny_fp8_swiglu", (x, out), weight, weight_map, plan=plan, weight_rows=2 * n, m=m, n=n, k=k
        )

    def dequantize(self, stream: Stream, weight: Fp8Matrix, *, rows: int, columns: int) -> int:
        """Launch the write of the matrix in bf16 into the scratch; returns its address."""
        threads = -(-columns // DEQUANTIZE_COLUMNS)
        grid = (-(-threads // DEQUANTIZE_BLOCK), rows, 1)
        arguments = (_matrix(weight, rows), c_uint32(rows), c_uint32(columns), pointer(self.scratch))
        self._dequantize.launch(stream, grid, DEQUANTIZE_BLOCK, arguments)
        return self.scratch.pointer

    def _launch(
        self,
        stream: Stream,
        name: str,
        operands: tuple[int, int],
        weight: Fp8Matrix,
        weight_map: CTensorMap,
        *,
        plan: Schedule,
        weight_rows: int,
        m: int,
        n: int,
        k: int,
    ) -> None:
        """One launch for each PASS_TOKENS tokens."""
        x, out = operands
        for first in range(0, m, PASS_TOKENS):
            tokens = min(PASS_TOKENS, m - first)
            width = width_of(tokens)
            stage_rows = width * DEPTH // X_COLUMNS  # of activations: a row of them takes as many as it has boxes
            problem = CProblem(
                tokens=tokens,
                outputs=n,
                rows=plan.rows,
                run=plan.run,
                chunks=-(-k // DEPTH),
                stages=plan.stages(stage_rows),
            )
            row = x + BF16_BYTES * k * first
            x_map = cached_map(row, (k, tokens), (BF16_BYTES * k,), (X_COLUMNS, width))
            target = pointer(out + BF16_BYTES * n * first)
            self._kernels[width, name].launch(
                stream,
                (plan.blocks(weight_rows), 1, 1),
                THREADS,
                (weight_map, x_map, _matrix(weight, weight_rows), problem, target),
                plan.shared_bytes(stage_rows),
            )


def _matrix(weight: Fp8Matrix, rows: int) -> CFp8Matrix:
    return CFp8Matrix(weight.codes, weight.scales, rows if weight.blocks > 1 else 0)
