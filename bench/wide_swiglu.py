"""Gate-up products with SwiGLU of many tokens: ``python -m bench.wide_swiglu``, for Llama-3-8B in under 30 s.

Each way to compute one is launched over and over beside an occupied multiprocessor, as the engine measures it, with
weights that are not in the L2 cache. Only ways in the engine's order of summation count, the skinny kernel's bits being
the reference: what is not is named. cuBLASLt's product with a kernel of its own for SwiGLU behind it stands beside the
one kernel of ours: the best of each, in µs of one launch, and all our tiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

import numpy as np

from bench.families import MODELS
from services.gpu_engine.cuda.attention_work import AttentionWork
from services.gpu_engine.cuda.bfloat16 import to_bfloat16
from services.gpu_engine.cuda.compiler import Compiler, default_cache
from services.gpu_engine.cuda.cublas_lt import Operands, Shape
from services.gpu_engine.cuda.driver import Buffer, Device
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.holds import Holds
from services.gpu_engine.cuda.kernels import Kernels
from services.gpu_engine.cuda.products import WIDE, MatrixProducts, WideWays, kernel_of
from services.gpu_engine.cuda.skinny_gemm import SkinnyGemm
from services.gpu_engine.cuda.step_arrays import StepArrays, StepLimits
from services.gpu_engine.cuda.step_clock import StepClock
from services.gpu_engine.cuda.wide_schedule import TILES
from services.gpu_engine.cuda.wide_swiglu import WideSwiglu

MODEL = "llama3-8b"
WEIGHT_BYTES = 1 << 30  # of several layers
PASSES = 3


class AllTiles(MatrixProducts):
    """Candidates are all tiles of ours, not the likely ones alone."""

    def candidates(self, shape: Shape) -> list[str]:
        found = super().candidates(shape)
        if WIDE not in map(kernel_of, found):
            return found
        return [*(f"{WIDE}{tile}" for tile in TILES), *(way for way in found if kernel_of(way) != WIDE)]


class Bench:
    """Random weights and activations, and the products over them."""

    def __init__(self, most_tokens: int) -> None:
        self.device = Device()
        compiler = Compiler(self.device.arch, default_cache())
        self.config = MODELS[MODEL]
        geometry, limits = Geometry(self.config), StepLimits(most_tokens, 1, 1)
        self._arrays, work = StepArrays(limits), AttentionWork(geometry, limits)
        kernels = Kernels(self.device, geometry, compiler, self._arrays.addresses, work)
        gate_up = Buffer(2 * most_tokens * 2 * self.config.ffn)
        wide = WideWays(WideSwiglu(self.device, compiler), kernels.swiglu, gate_up)
        self.products = AllTiles(self.device, SkinnyGemm(self.device, compiler), wide=wide)
        self.clock = StepClock(Holds(compiler))
        pool = to_bfloat16(np.random.default_rng().standard_normal(1 << 24, np.float32) * np.float32(0.02))
        self.weights = Buffer(WEIGHT_BYTES, "random weights")
        for offset in range(0, WEIGHT_BYTES, pool.nbytes):
            self.weights.upload(pool, offset)
        self.x = Buffer(2 * most_tokens * self.config.hidden)
        for offset in range(0, self.x.nbytes, pool.nbytes):
            self.x.upload(pool.view(np.uint8)[: self.x.nbytes - offset], offset)
        self.out = Buffer(2 * most_tokens * self.config.ffn)

    def shape(self, m: int) -> Shape:
        return Shape(m, self.config.ffn, self.config.hidden, "swiglu")

    def operands(self, shape: Shape) -> list[Operands]:
        """Of successive launches: weights one behind the other."""
        stride = 2 * shape.weight_rows * shape.k
        copies = range(WEIGHT_BYTES // stride)
        return [Operands(self.x.pointer, self.weights.pointer + i * stride, self.out.pointer) for i in copies]

    def seconds(self, shape: Shape) -> dict[str, float]:
        """The least of PASSES, of each way in order."""
        operands = self.operands(shape)
        ways = self.products.in_order(self.clock.stream, shape, operands[0])
        for way in sorted(set(self.products.candidates(shape)) - set(ways)):
            print(f"NOT IN ORDER: {way} for {shape}", flush=True)
        looks = [self.clock.alone(self.products, {shape: operands}, {shape: ways})[shape] for _ in range(PASSES)]
        return {way: min(look[way] for look in looks) for way in ways}


def report(shape: Shape, seconds: Mapping[str, float]) -> None:
    ours = {way.removeprefix(WIDE): time for way, time in seconds.items() if kernel_of(way) == WIDE}
    library = min((time for way, time in seconds.items() if kernel_of(way) != WIDE), default=float("nan"))
    ranked = sorted(ours, key=ours.__getitem__)
    best = min(ours.values(), default=float("nan"))
    print(
        f"{shape.m:5} {library * 1e6:8.1f} {best * 1e6:8.1f} {library / best:6.2f}"
        f" {shape.operations / best / 1e12:7.0f} {shape.bytes / best / 1e12:6.2f}  "
        + ", ".join(f"{tile} {ours[tile] * 1e6:.1f}" for tile in ranked),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 256, 512, 2048])
    arguments = parser.parse_args()
    began = time.monotonic()
    bench = Bench(max(arguments.tokens))
    print(f"{bench.device.name}, {MODEL}, ready after {time.monotonic() - began:.1f} s")
    print(f"{'m':>5} {'cuBLASLt':>8} {'ours':>8} {'ratio':>6} {'TFLOP/s':>7} {'TB/s':>6}  µs of each tile")
    for m in arguments.tokens:
        report(bench.shape(m), bench.seconds(bench.shape(m)))


if __name__ == "__main__":
    main()
