"""The model's matrix products: each shape by the fastest way that keeps the engine's one order of summation.

The order: k in steps of 16, from first to last, into one fp32 sum for each output. Our own kernels, the skinny one for
few tokens and the wide one for SwiGLU of more, are written so; cuBLASLt's algorithms that do not split k come to the
same bits on Hopper, whatever their tiles. It is checked for each before it is taken. So a row's bits do not depend on
what shares its step. On a GPU without the skinny kernel nothing is checked, and the library's algorithms may differ
from bucket to bucket.

Which way is fastest is measured at the start (choosing.py) and kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.cuda.cublas_lt import CublasLt, Operands, Shape
from services.gpu_engine.cuda.driver import Buffer, Device, Stream
from services.gpu_engine.cuda.errors import DriverError
from services.gpu_engine.cuda.kept_choices import KeptChoices
from services.gpu_engine.cuda.skinny_gemm import MOST_TOKENS, SkinnyGemm
from services.gpu_engine.cuda.skinny_schedule import Schedule, schedules
from services.gpu_engine.cuda.wide_schedule import TILES, WideTile, likely_tiles
from services.gpu_engine.cuda.wide_swiglu import WideSwiglu

SKINNY, WIDE = "skinny ", "wide "  # begin the names of our own kernels' ways among the library's algorithms
CHECKED_ROWS = 2  # the order of sums is that of the algorithm, all rows have it
CHOSEN_BY = "time of the step, in full at anchors, of the library's for a short k"
"""Part of what kept choices were made with: change it, and all are made anew."""


def kernel_of(way: str) -> str:
    """Whose a way is: one of our own kernels' or the library's."""
    return next((own for own in (SKINNY, WIDE) if way.startswith(own)), "library")


@dataclass(frozen=True)
class WideWays:
    """What computes products with SwiGLU of more tokens than the skinny kernel takes.

    Attributes:
        kernel: product and SwiGLU in one.
        swiglu: launches SwiGLU behind a product of the library, given a stream, the tokens, and the addresses of
            gate_up [tokens, gate | up] and out [tokens, ffn].
        gate_up: room for the product of the largest step.
    """

    kernel: WideSwiglu
    swiglu: Callable[[Stream, int, int, int], None]
    gate_up: Buffer


class MatrixProducts:
    """Launches products, each shape by the way that was settled on, else by the first candidate.

    Args:
        skinny: for GPUs that have it.
        choices: folder where they are kept; None keeps none.
        wide: for GPUs that have ``skinny``; without, ``swiglu`` takes no more tokens than that.

    Attributes:
        ways: how each shape that has been launched or settled is computed.
    """

    def __init__(
        self,
        device: Device,
        skinny: SkinnyGemm | None,
        choices: Path | None = None,
        wide: WideWays | None = None,
    ) -> None:
        self._library = CublasLt(device)
        self._skinny, self._wide = skinny, wide
        own = f"skinny: {bool(skinny)}, wide SwiGLU: {', '.join(map(str, TILES)) if wide else False}"
        made_with = f"{device.name}, {self._library.version}, {own}, by {CHOSEN_BY}"
        self._kept = KeptChoices(choices, made_with)
        self.ways: dict[Shape, str] = {}
        self._seen: dict[Shape, list[Operands]] | None = None

    def matmul(
        self, stream: Stream, x: int, weight: int, out: int, *, m: int, n: int, k: int, fp32_out: bool = False
    ) -> None:
        """Launch out[m, n] = x[m, k] @ weight[n, k]^T; all row-major, addresses of device memory.

        Args:
            fp32_out: ``out`` is float32, else bf16.

        Raises:
            DriverError: there is no way to compute this shape, or the launch failed.
        """
        self._run(stream, Shape(m, n, k, "fp32" if fp32_out else "bf16"), Operands(x, weight, out))

    def fuses_swiglu(self, m: int) -> bool:
        """Whether ``swiglu`` can be used for so many tokens."""
        return self._skinny is not None and (m <= MOST_TOKENS or self._wide is not None)

    def swiglu(self, stream: Stream, x: int, weight: int, out: int, *, m: int, n: int, k: int) -> None:
        """Launch out[m, n] = silu(x @ gate^T) * (x @ up^T), ``weight`` [2 n, k] being gate over up.

        Bit for bit what ``matmul`` and the SwiGLU kernel make of it.
        """
        self._run(stream, Shape(m, n, k, "swiglu"), Operands(x, weight, out))

    def _run(self, stream: Stream, shape: Shape, operands: Operands) -> None:
        if self._seen is not None:
            self._seen.setdefault(shape, []).append(operands)
        if shape not in self.ways:
            self.ways[shape] = self._kept.get(shape) or self.candidates(shape)[0]
        self.launch(stream, shape, operands, self.ways[shape])

    @contextmanager
    def observing(self) -> Iterator[dict[Shape, list[Operands]]]:
        """The products launched inside that nothing is kept of, with the operands of each launch."""
        self._seen = {}
        try:
            yield self._seen
        finally:
            for shape in [shape for shape in self._seen if self._kept.get(shape)]:
                del self._seen[shape]
            self._seen = None

    def settle(self, shape: Shape, way: str) -> None:
        """Compute ``shape`` this way, and at the next start too, if ``keep`` is called."""
        self.ways[shape] = way
        self._kept.add(shape, way)

    def keep(self) -> None:
        self._kept.write()

    def candidates(self, shape: Shape) -> list[str]:
        """The likeliest of our own kernel first, then the library's as it ranks them."""
        if self._skinny is None:
            return self._library.candidates(shape, split=shape.m <= MOST_TOKENS)
        if shape.m <= MOST_TOKENS:
            skinny = schedules(shape.weight_rows, self._skinny.multiprocessors)
            own = [f"{SKINNY}{schedule.rows}" for schedule in skinny]
            return own if shape.ending == "swiglu" else own + self._library.candidates(shape, split=False)
        if shape.ending != "swiglu":
            return self._library.candidates(shape, split=False)
        assert self._wide
        tiles = likely_tiles(shape.m, shape.weight_rows, self._wide.kernel.multiprocessors)
        return [f"{WIDE}{tile}" for tile in tiles] + self._library.candidates(_without_swiglu(shape), split=False)

    def launch(self, stream: Stream, shape: Shape, operands: Operands, way: str) -> None:
        """Launch a product by one of its ``candidates``. Raises DriverError when it is refused."""
        if way.startswith(SKINNY):
            self._launch_skinny(stream, shape, operands, int(way.removeprefix(SKINNY)))
        elif shape.ending == "swiglu":
            self._launch_wide(stream, shape, operands, way)
        else:
            self._library.launch(stream, shape, operands, way)

    def _launch_skinny(self, stream: Stream, shape: Shape, operands: Operands, rows: int) -> None:
        assert self._skinny
        m, n, k, ending = shape
        schedule = Schedule.of(rows, shape.weight_rows, self._skinny.multiprocessors)
        if ending == "swiglu":
            self._skinny.swiglu(stream, *operands, m=m, n=n, k=k, schedule=schedule)
        else:
            self._skinny.matmul(stream, *operands, m=m, n=n, k=k, fp32_out=ending == "fp32", schedule=schedule)

    def _launch_wide(self, stream: Stream, shape: Shape, operands: Operands, way: str) -> None:
        assert self._wide
        if way.startswith(WIDE):
            tile = WideTile.parse(way.removeprefix(WIDE))
            self._wide.kernel.launch(stream, *operands, m=shape.m, n=shape.n, k=shape.k, tile=tile)
        else:
            gate_up = self._wide.gate_up.pointer
            self._library.launch(stream, _without_swiglu(shape), operands._replace(out=gate_up), way)
            self._wide.swiglu(stream, shape.m, gate_up, operands.out)

    def in_order(self, stream: Stream, shape: Shape, operands: Operands) -> list[str]:
        """The candidates that give the skinny kernel's bits. Each has run when this returns, so its kernel is loaded.

        Raises:
            DriverError: there is none.
        """
        candidates, few = self.candidates(shape), shape._replace(m=min(shape.m, CHECKED_ROWS))
        out = Buffer(shape.out_bytes, "a product that is being checked")

        def first_rows(shape: Shape, way: str) -> NDArray[np.uint8]:
            out.fill(0xFF)  # NaN
            self.launch(stream, shape, operands._replace(out=out.pointer), way)
            stream.synchronize()
            return out.download(np.uint8, (few.out_bytes,))

        found = {way: first_rows(shape, way) for way in candidates}
        if self._skinny is None:
            return candidates
        expected = first_rows(few, self.candidates(few)[0])
        same = [way for way, rows in found.items() if np.array_equal(rows, expected)]
        if not same:
            raise DriverError("cuBLASLt", "no algorithm with sequential sums", f"for {shape}")
        return same


def _without_swiglu(shape: Shape) -> Shape:
    return Shape(shape.m, shape.weight_rows, shape.k, "bf16")
