"""Skinny products beside cuBLASLt's, for the shapes of four model families: ``python -m bench.skinny_gemm``.

Each product is launched over and over in one graph, its weights taken in turn from enough copies that none is in the
L2 cache. Medians of the time of one launch. Fractions are of the weights' bytes at the streaming ceiling of an H200.
The two libraries are timed in turns, so that both see the same clocks. Then, for Llama-3-8B: what the knobs of the
overlap do to a chain of a layer's four products, which is the products' part of a decode step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.gpu_engine.cuda.bfloat16 import to_bfloat16
from services.gpu_engine.cuda.compiler import Compiler, default_cache
from services.gpu_engine.cuda.driver import Buffer, Device, Graph, Stream, Timer
from services.gpu_engine.cuda.products import MatrixProducts
from services.gpu_engine.cuda.skinny_gemm import MOST_TOKENS, Norm, Overlap, SkinnyGemm, square_bytes

BYTES_PER_SECOND = 4.4e12
ROTATED_BYTES = 1 << 30
WEIGHT_BYTES = 4 << 30


@dataclass(frozen=True)
class Shape:
    name: str
    outputs: int
    depth: int
    kind: str = "store"  # or swiglu (outputs = ffn), add, logits

    @property
    def weight_rows(self) -> int:
        return 2 * self.outputs if self.kind == "swiglu" else self.outputs

    @property
    def nbytes(self) -> int:
        return 2 * self.weight_rows * self.depth


def family(name: str, hidden: int, query: int, kv: int, ffn: int | None, vocabulary: int) -> list[Shape]:
    shapes = [
        Shape(f"{name} qkv", query + 2 * kv, hidden),
        Shape(f"{name} output", hidden, query, "add"),
        Shape(f"{name} logits", vocabulary, hidden, "logits"),
    ]
    if ffn:
        shapes[2:2] = [Shape(f"{name} gate-up", ffn, hidden, "swiglu"), Shape(f"{name} down", hidden, ffn, "add")]
    return shapes


LLAMA = family("Llama-3-8B", 4096, 4096, 1024, 14336, 128256)
SHAPES = [
    *LLAMA,
    *family("Phi-4", 5120, 5120, 1280, 17920, 100352)[:-1],
    *family("Qwen3-32B", 5120, 8192, 1024, 25600, 151936)[:-1],
    *family("Qwen3-30B-A3B", 2048, 4096, 512, None, 151936)[:-1],
    *family("SmolLM2-135M", 576, 576, 192, 1536, 49152),
]


class Bench:
    """Random weights and activations, and the products over them."""

    def __init__(self) -> None:
        self.device, self.stream = Device(), Stream(overlap=True)
        self.timer = Timer(self.stream)
        compiler = Compiler(self.device.arch, default_cache())
        self.gemm = SkinnyGemm(self.device, compiler)
        self.library = MatrixProducts(self.device, compiler, None)
        rng = np.random.default_rng()
        pool = to_bfloat16(rng.standard_normal(1 << 24).astype(np.float32) * np.float32(0.02))
        self.weights = Buffer(WEIGHT_BYTES, "random weights")
        for offset in range(0, WEIGHT_BYTES, pool.nbytes):
            self.weights.upload(pool, offset)
        self.x = Buffer.of(np.roll(pool, 12345)[: MOST_TOKENS * 25600])
        self.out = Buffer(4 * MOST_TOKENS * 151936)
        self.residual = Buffer(4 * MOST_TOKENS * 25600)
        self.residual.fill(0)
        self.prepared = Buffer(2 * MOST_TOKENS * 25600)
        self.squares = Buffer.of(np.ones(square_bytes(25600) // 4, np.float32))

    def graph(self, launch: Callable[[], None]) -> Graph:
        launch()
        self.stream.synchronize()
        with self.stream.capture() as graphs:
            launch()
        return graphs[0]

    def seconds(self, *graphs: Graph, repeats: int = 15) -> list[float]:
        """Median time of a replay of each, taken in turns."""
        times: list[list[float]] = [[] for _ in graphs]
        for _ in range(repeats + 2):
            for graph, taken in zip(graphs, times, strict=True):
                self.timer.start()
                graph.launch(self.stream)
                taken.append(self.timer.stop())
        return [statistics.median(taken[2:]) for taken in times]

    def launches(self, shape: Shape) -> list[int]:
        """Addresses of the weights of successive launches."""
        stride = -(-shape.nbytes // 256) * 256
        copies = max(1, min(WEIGHT_BYTES // stride, -(-ROTATED_BYTES // stride)))
        return [self.weights.pointer + i % copies * stride for i in range(max(copies, 16) if copies < 64 else 64)]

    def skinny(self, shape: Shape, tokens: int, weight: int, *, fused: bool = True, overlap: Overlap) -> None:
        gemm, x, out = self.gemm, self.x.pointer, self.out.pointer
        m, n, k, stream = tokens, shape.outputs, shape.depth, self.stream
        norm = Norm(self.squares.pointer, 4096, 1e-5)
        if not fused:
            gemm.matmul(stream, x, weight, out, m=m, n=shape.weight_rows, k=k, overlap=overlap)
        elif shape.kind == "swiglu":
            gemm.swiglu(stream, x, weight, out, m=m, n=n, k=k, norm=norm, overlap=overlap)
        elif shape.kind == "add":
            gemm.add(
                stream,
                x,
                weight,
                self.residual.pointer,
                m=m,
                n=n,
                k=k,
                norm_weight=x,
                out=self.prepared.pointer,
                squares=self.squares.pointer,
                overlap=overlap,
            )
        else:
            logits = shape.kind == "logits"
            gemm.matmul(
                stream,
                x,
                weight,
                out,
                m=m,
                n=n,
                k=k,
                fp32_out=logits,
                norm=None if logits else norm,
                overlap=overlap,
            )

    def cublas(self, shape: Shape, tokens: int, weight: int) -> None:
        logits = shape.kind == "logits"
        m, n, k = tokens, shape.weight_rows, shape.depth
        self.library.matmul(self.stream, self.x.pointer, weight, self.out.pointer, m=m, n=n, k=k, fp32_out=logits)

    def compare(self, shape: Shape, tokens: int) -> None:
        weights = self.launches(shape)

        def each(launch: Callable[[int], None]) -> Graph:
            def launch_all() -> None:
                for weight in weights:
                    launch(weight)

            return self.graph(launch_all)

        default, floor = Overlap(), shape.nbytes / BYTES_PER_SECOND
        graphs = (
            each(lambda weight: self.skinny(shape, tokens, weight, fused=False, overlap=default)),
            each(lambda weight: self.skinny(shape, tokens, weight, overlap=default)),
            each(lambda weight: self.skinny(shape, tokens, weight, overlap=Overlap(early=0))),
            each(lambda weight: self.cublas(shape, tokens, weight)),
        )
        plain, fused, late, cublas = (time / len(weights) for time in self.seconds(*graphs))
        print(
            f"{shape.name:22} {shape.weight_rows:7} {shape.depth:6} {tokens:4} {floor * 1e6:8.2f} {plain * 1e6:8.2f}"
            f" {fused * 1e6:8.2f} {late * 1e6:8.2f} {cublas * 1e6:8.2f} {shape.nbytes / plain / 1e12:6.2f}"
            f" {floor / plain:7.1%} {floor / fused:7.1%} {floor / cublas:7.1%}",
            flush=True,
        )

    def layer_chain(self, tokens: int, overlap: Overlap) -> Graph:
        """The four products of eight of Llama-3-8B's layers."""

        def launch() -> None:
            address = self.weights.pointer
            for _ in range(8):
                for shape in LLAMA[:4]:
                    self.skinny(shape, tokens, address, overlap=overlap)
                    address += shape.nbytes

        return self.graph(launch)

    def sweep(self, tokens: int, multiprocessors: int) -> None:
        self.gemm = SkinnyGemm(self.device, Compiler(self.device.arch, default_cache()), multiprocessors)
        floor = 8 * sum(shape.nbytes for shape in LLAMA[:4]) / BYTES_PER_SECOND
        settings = [Overlap(prefetched=p, early=e) for p in (0, 4, 12) for e in (0, 1, 2, 4, 8, 1 << 20)]
        times = self.seconds(*(self.layer_chain(tokens, overlap) for overlap in settings))
        print(f"\n{tokens} tokens, {multiprocessors} multiprocessors: us a layer (of the floor, {floor / 8 * 1e6:.1f})")
        for overlap, time in zip(settings, times, strict=True):
            knobs = f"prefetched {overlap.prefetched:3} early {overlap.early:7}"
            print(f"  {knobs}: {time / 8 * 1e6:7.2f} {floor / time:6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 16, 32, 64])
    parser.add_argument("--shapes", default="", help="only shapes whose name contains this")
    parser.add_argument("--sweep", type=int, nargs="*", default=[1, 32], help="tokens for the knobs of the overlap")
    arguments = parser.parse_args()
    bench = Bench()
    print(bench.device.name, bench.device.arch)
    print(
        f"{'us a launch':22} {'rows':>7} {'depth':>6} {'m':>4} {'floor':>8} {'plain':>8} {'fused':>8} {'late':>8}"
        f" {'cuBLASLt':>8} {'TB/s':>6} {'of it':>7} {'fused':>7} {'cuBLAS':>7}"
    )
    for shape in SHAPES:
        if arguments.shapes in shape.name:
            for tokens in arguments.tokens:
                bench.compare(shape, tokens)
    for tokens in arguments.sweep:
        for multiprocessors in (bench.device.multiprocessors, bench.device.multiprocessors - 1, 120):
            bench.sweep(tokens, multiprocessors)


if __name__ == "__main__":
    main()
