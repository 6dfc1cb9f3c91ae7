"""Products of FP8 weights beside those in bf16, on a GPU: ``python -m bench.fp8``, for Llama-3-8B in some 20 s.

Each product is launched with weights taken in turn from enough copies that none is in the L2 cache; medians of the time
of one launch. Fractions are of the weights' bytes at the streaming ceiling of an H200. The bf16 columns are the skinny
kernel, up to 64 tokens, and the library's first choice; the last one dequantizes first and then uses the library.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bench.skinny_gemm import BYTES_PER_SECOND, LLAMA, Bench, Shape
from services.gpu_engine.cuda.compiler import Compiler, default_cache
from services.gpu_engine.cuda.driver import Buffer
from services.gpu_engine.cuda.fp8_matrix import Fp8Matrix
from services.gpu_engine.cuda.fp8_products import MOST_TOKENS as MOST_FP8_TOKENS
from services.gpu_engine.cuda.fp8_products import Fp8Products
from services.gpu_engine.cuda.skinny_gemm import MOST_TOKENS

TOKENS = (1, 8, 32, 64, 128, 256)


class Fp8Bench(Bench):
    def __init__(self) -> None:
        super().__init__()
        compiler = Compiler(self.device.arch, default_cache())
        self.scratch = Buffer(max(shape.nbytes for shape in LLAMA))
        self.fp8 = Fp8Products(self.device, compiler, self.library, self.scratch)
        self.scales = Buffer.of(np.full(1 << 22, 1e-3, np.float32))
        self.x = Buffer.of(np.tile(self.x.download(np.uint16, (MOST_TOKENS * 25600,)), MOST_FP8_TOKENS // MOST_TOKENS))
        self.out = Buffer(2 * MOST_FP8_TOKENS * 2 * 14336)

    def microseconds(self, shape: Shape, tokens: int, blocks: bool) -> dict[str, float]:
        """Of each way to compute the product that there is for so many tokens."""
        m, n, k, x, out = tokens, shape.outputs, shape.depth, self.x.pointer, self.out.pointer
        gated = shape.kind == "swiglu"

        def matrix(at: int) -> Fp8Matrix:
            return Fp8Matrix(at, self.scales.pointer, -(-k // 128) if blocks else 1)

        def library(at: int) -> None:
            self.library.matmul(self.stream, x, at, out, m=m, n=shape.weight_rows, k=k)

        def streamed(at: int) -> None:
            product = self.fp8.swiglu if gated else self.fp8.matmul
            product(self.stream, x, matrix(at), out, m=m, n=n, k=k)

        def skinny(at: int) -> None:
            product = self.gemm.swiglu if gated else self.gemm.matmul
            product(self.stream, x, at, out, m=m, n=n, k=k)

        def dequantized(at: int) -> None:
            library(self.fp8.dequantize(self.stream, matrix(at), rows=shape.weight_rows, columns=k))

        ways: dict[str, Callable[[int], None]] = {
            "fp8": streamed,
            "skinny bf16": skinny,
            "library bf16": library,
            "dequantized": dequantized,
        }
        if tokens > MOST_TOKENS:
            del ways["skinny bf16"]
        graphs = [self.repeated(shape, launch) for launch in ways.values()]
        seconds = self.seconds(*graphs)
        launches = len(self.addresses(shape))
        return {way: 1e6 * taken / launches for way, taken in zip(ways, seconds, strict=True)}


def main() -> None:
    bench = Fp8Bench()
    print(f"{bench.device.name}; µs of a product, in parentheses the fraction of {BYTES_PER_SECOND / 1e12} TB/s")
    for blocks in (False, True):
        print(f"\nscales {'of 128 columns' if blocks else 'of a row'}")
        ways = ("fp8", "skinny bf16", "library bf16", "dequantized")
        print(f"{'product':<22} {'tokens':>6} " + " ".join(f"{way:>16}" for way in ways))
        for shape in LLAMA:
            if shape.kind == "logits":
                continue
            for tokens in TOKENS:
                times = bench.microseconds(shape, tokens, blocks)
                cells = []
                for way in ways:
                    nbytes = shape.nbytes // 2 if way == "fp8" else shape.nbytes
                    taken = times.get(way)
                    cells.append(
                        f"{taken:8.1f} ({nbytes / BYTES_PER_SECOND / taken * 1e6:4.0%})" if taken else f"{'-':>15}"
                    )
                print(f"{shape.name:<22} {tokens:>6} " + " ".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
