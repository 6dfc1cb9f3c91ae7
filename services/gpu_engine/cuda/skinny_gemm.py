"""Products of at most 64 tokens, as streams of the weights: kernels/skinny_gemm.cu with its scratch memory.

Each product takes the tensor maps of its two operands and a description of its tiles. All launches may overlap with
the kernel before them (kernels/dependent_launch.cuh).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Argument, Buffer, Device, Kernel, Module, Stream, pointer
from services.gpu_engine.cuda.geometry import BF16_BYTES
from services.gpu_engine.cuda.tensor_map import CTensorMap, tensor_map

WIDTHS = (8, 16, 32, 64)
"""Tokens that a build holds."""
MOST_TOKENS = WIDTHS[-1]
TILE_ROWS, HALF_ROWS, DEPTH = 128, 64, 64
THREADS = 320
MOST_TILES = 1 << 16
KERNELS = ("skinny_store", "skinny_logits", "skinny_swiglu", "skinny_residual")


@dataclass(frozen=True)
class Norm:
    """An RMSNorm that a product applies to its sums.

    Attributes:
        squares: float32 [tiles, 64], what ``SkinnyGemm.add`` left.
        width: elements of a normed row.
    """

    squares: int
    width: int
    eps: float


@dataclass(frozen=True)
class Overlap:
    """How a launch overlaps with its neighbours; changes no result.

    Attributes:
        prefetched: chunks (16 KiB) of weights that each block brings into L2 while it waits for its predecessor, beyond
            the ring in shared memory. Pays behind a kernel that leaves the memory idle.
        early: chunks still to be asked for when the successor may begin.
    """

    prefetched: int = 0
    early: int = 2


class CProblem(ctypes.Structure):
    """``blink::Problem``."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("partial", "arrivals", "squares")),
        ("square_tiles", ctypes.c_uint32),
        ("width", ctypes.c_float),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("tokens", "outputs", "tiles", "chunks", "tile_rows", "second")),
        *((name, ctypes.c_uint32) for name in ("prefetched", "early")),
    )


def square_bytes(hidden: int) -> int:
    """Of the sums of squares that ``SkinnyGemm.add`` leaves of rows of ``hidden`` elements."""
    return 4 * tiles_of(hidden) * MOST_TOKENS


def tiles_of(outputs: int, rows: int = TILE_ROWS) -> int:
    return -(-outputs // rows)


def blocks_of(chunks: int, most: int) -> int:
    """Blocks that share ``chunks``: all equally if little fewer than ``most`` can, or else ``most``.

    Depends on nothing else, because the order of summation follows from it.
    """
    equal = (blocks for blocks in range(most, most * 15 // 16, -1) if chunks % blocks == 0)
    return min(chunks, next(equal, most))


class SkinnyGemm:
    """The products of one engine, which run one after the other: they share their scratch memory.

    All matrices are row-major bf16 with a multiple of 8 columns, at addresses that are multiples of 16.

    Args:
        multiprocessors: to share the weights between; one less than the GPU's, the control loop has one.
    """

    def __init__(self, device: Device, compiler: Compiler, multiprocessors: int | None = None) -> None:
        self._blocks = multiprocessors or device.multiprocessors - 1
        self._kernels: dict[tuple[int, str], Kernel] = {}
        self._shared: dict[int, int] = {}
        for width in WIDTHS:
            module = Module(compiler.build(("skinny_gemm.cu",), {"BLINK_SKINNY_TOKENS": width}))
            self._shared[width] = int(module.constant("skinny_shared_bytes"))
            for name in KERNELS:
                kernel = self._kernels[width, name] = module.kernel(name, waits=True)
                kernel.allow_shared(self._shared[width])
        self._partial = Buffer(2 * self._blocks * 4 * TILE_ROWS * MOST_TOKENS, "unfinished sums of products")
        self._arrivals = Buffer(4 * MOST_TILES, "counters of unfinished tiles")
        self._arrivals.fill(0)

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
        norm: Norm | None = None,
        overlap: Overlap = Overlap(),
    ) -> None:
        """Launch out[m, n] = x[m, k] @ weight[n, k]^T, as CublasLt.matmul; the rows scaled by ``norm``, if given."""
        name = "skinny_logits" if fp32_out else "skinny_store"
        product = _Product(x, weight, m, n, k, n, norm, overlap)
        self._launch(stream, name, product, (pointer(out),))

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
        norm: Norm | None = None,
        overlap: Overlap = Overlap(),
    ) -> None:
        """Launch out[m, n] = silu(x @ gate^T) * (x @ up^T), ``weight`` being gate over up, [2 n, k]."""
        product = _Product(x, weight, m, n, k, 2 * n, norm, overlap, tile_rows=HALF_ROWS, second=n)
        self._launch(stream, "skinny_swiglu", product, (pointer(out),))

    def add(
        self,
        stream: Stream,
        x: int,
        weight: int,
        residual: int,
        *,
        m: int,
        n: int,
        k: int,
        norm_weight: int,
        out: int,
        squares: int,
        overlap: Overlap = Overlap(),
    ) -> None:
        """Launch residual[m, n] += x[m, k] @ weight[n, k]^T in float32, and prepare the next norm.

        Args:
            norm_weight: bf16 [n].
            out: residual * norm_weight, bf16 [m, n].
            squares: float32, ``square_bytes(n)``: what ``Norm`` takes to find the rows' factors.
        """
        results = (pointer(residual), pointer(norm_weight), pointer(out), pointer(squares))
        self._launch(stream, "skinny_residual", _Product(x, weight, m, n, k, n, None, overlap), results)

    def _launch(self, stream: Stream, name: str, product: _Product, results: Sequence[Argument]) -> None:
        """Launch ``product`` with ``results``, the kernel's own arguments."""
        width = next((width for width in WIDTHS if width >= product.tokens), None)
        if width is None or product.tiles > MOST_TILES:
            raise ValueError(f"{product} has more than {MOST_TOKENS} tokens or {MOST_TILES} tiles")
        norm, overlap = product.norm, product.overlap
        problem = CProblem(
            partial=self._partial.pointer,
            arrivals=self._arrivals.pointer,
            squares=norm.squares if norm else 0,
            square_tiles=tiles_of(norm.width) if norm else 0,
            width=norm.width if norm else 1,
            eps=norm.eps if norm else 0,
            tokens=product.tokens,
            outputs=product.outputs,
            tiles=product.tiles,
            chunks=product.chunks,
            tile_rows=product.tile_rows,
            second=product.second,
            prefetched=overlap.prefetched,
            early=overlap.early,
        )
        weight = _matrix_map(product.weight, product.weight_rows, product.depth, HALF_ROWS)
        x = _matrix_map(product.x, product.tokens, product.depth, width)
        blocks = blocks_of(product.tiles * product.chunks, self._blocks)
        self._kernels[width, name].launch(
            stream, (blocks, 1, 1), THREADS, (weight, x, problem, *results), self._shared[width]
        )


@cache
def _matrix_map(address: int, rows: int, columns: int, box_rows: int) -> CTensorMap:
    shape, strides = (columns, rows), (BF16_BYTES * columns,)
    return tensor_map(address, shape=shape, strides=strides, box=(DEPTH, box_rows))


@dataclass(frozen=True)
class _Product:
    """What a launch computes: tiles of ``tile_rows`` rows of the weight, the second half ``second`` below the first."""

    x: int
    weight: int
    tokens: int
    outputs: int
    depth: int
    weight_rows: int
    norm: Norm | None
    overlap: Overlap
    tile_rows: int = TILE_ROWS
    second: int = HALF_ROWS

    @property
    def tiles(self) -> int:
        return tiles_of(self.outputs, self.tile_rows)

    @property
    def chunks(self) -> int:
        """Of a tile."""
        return -(-self.depth // DEPTH)
