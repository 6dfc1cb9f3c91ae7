"""Skinny products beside cuBLASLt's: ``python -m bench.skinny_gemm``, for Llama-3-8B in under 25 s.

Each product is launched over and over in one graph, its weights taken in turn from enough copies that none is in the
L2 cache. Medians of the time of one launch. Fractions are of the weights' bytes at the streaming ceiling of an H200.
Both are timed in turns, so that they see the same clocks. Then, for Llama-3-8B: all ways to share each product's
weights, the best first, beside the one that serves when nothing is measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from services.gpu_engine.cuda.bfloat16 import to_bfloat16
from services.gpu_engine.cuda.compiler import Compiler, default_cache
from services.gpu_engine.cuda.driver import Buffer, Device, Graph, Stream, Timer
from services.gpu_engine.cuda.products import MatrixProducts
from services.gpu_engine.cuda.skinny_gemm import MOST_TOKENS, SkinnyGemm
from services.gpu_engine.cuda.skinny_schedule import RING_BYTES, Schedule, schedules

BYTES_PER_SECOND = 4.4e12
ROTATED_BYTES = 1 << 30
WEIGHT_BYTES = 2 << 30
RINGS = (RING_BYTES // 2, RING_BYTES)


@dataclass(frozen=True)
class Shape:
    name: str
    outputs: int
    depth: int
    kind: str = "store"  # or swiglu (outputs = ffn), logits

    @property
    def weight_rows(self) -> int:
        return 2 * self.outputs if self.kind == "swiglu" else self.outputs

    @property
    def nbytes(self) -> int:
        return 2 * self.weight_rows * self.depth


def family(name: str, hidden: int, query: int, kv: int, ffn: int | None, vocabulary: int) -> list[Shape]:
    shapes = [
        Shape(f"{name} qkv", query + 2 * kv, hidden),
        Shape(f"{name} output", hidden, query),
        Shape(f"{name} logits", vocabulary, hidden, "logits"),
    ]
    if ffn:
        shapes[2:2] = [Shape(f"{name} gate-up", ffn, hidden, "swiglu"), Shape(f"{name} down", hidden, ffn)]
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
        self.library = MatrixProducts(self.device, None)
        self.multiprocessors = self.device.multiprocessors - 1
        rng = np.random.default_rng()
        pool = to_bfloat16(rng.standard_normal(1 << 24).astype(np.float32) * np.float32(0.02))
        self.weights = Buffer(WEIGHT_BYTES, "random weights")
        for offset in range(0, WEIGHT_BYTES, pool.nbytes):
            self.weights.upload(pool, offset)
        self.x = Buffer.of(np.roll(pool, 12345)[: MOST_TOKENS * 25600])
        self.out = Buffer(4 * MOST_TOKENS * 151936)

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

    def addresses(self, shape: Shape) -> list[int]:
        """Of the weights of successive launches."""
        stride = -(-shape.nbytes // 256) * 256
        copies = max(1, min(WEIGHT_BYTES // stride, -(-ROTATED_BYTES // stride)))
        return [self.weights.pointer + i % copies * stride for i in range(max(copies, 8) if copies < 64 else 64)]

    def repeated(self, shape: Shape, launch: Callable[[int], None]) -> Graph:
        """A launch with each of the weights."""

        def launch_all() -> None:
            for weight in self.addresses(shape):
                launch(weight)

        return self.graph(launch_all)

    def plain(self, shape: Shape, tokens: int, weight: int, schedule: Schedule | None = None) -> None:
        x, out, n, k = self.x.pointer, self.out.pointer, shape.weight_rows, shape.depth
        fp32 = shape.kind == "logits"
        self.gemm.matmul(self.stream, x, weight, out, m=tokens, n=n, k=k, fp32_out=fp32, schedule=schedule)

    def fused(self, shape: Shape, tokens: int, weight: int, schedule: Schedule | None = None) -> None:
        """As a step has it."""
        if shape.kind == "swiglu":
            x, out, n, k = self.x.pointer, self.out.pointer, shape.outputs, shape.depth
            self.gemm.swiglu(self.stream, x, weight, out, m=tokens, n=n, k=k, schedule=schedule)
        else:
            self.plain(shape, tokens, weight, schedule)

    def cublas(self, shape: Shape, tokens: int, weight: int) -> None:
        x, out, n, k = self.x.pointer, self.out.pointer, shape.weight_rows, shape.depth
        self.library.matmul(self.stream, x, weight, out, m=tokens, n=n, k=k, fp32_out=shape.kind == "logits")

    def compare(self, shape: Shape, tokens: int) -> None:
        floor, count = shape.nbytes / BYTES_PER_SECOND, len(self.addresses(shape))
        graphs = (
            self.repeated(shape, lambda weight: self.plain(shape, tokens, weight)),
            self.repeated(shape, lambda weight: self.fused(shape, tokens, weight)),
            self.repeated(shape, lambda weight: self.cublas(shape, tokens, weight)),
        )
        plain, fused, cublas = (time / count for time in self.seconds(*graphs))
        print(
            f"{shape.name:22} {shape.weight_rows:7} {shape.depth:6} {tokens:4} {floor * 1e6:8.2f} {plain * 1e6:8.2f}"
            f" {fused * 1e6:8.2f} {cublas * 1e6:8.2f} {shape.nbytes / fused / 1e12:6.2f}"
            f" {floor / plain:7.1%} {floor / fused:7.1%} {floor / cublas:7.1%}",
            flush=True,
        )

    def sweep(self, shape: Shape, tokens: int, shown: int = 6) -> None:
        """The fastest schedules, and the chosen one's place among them."""
        chosen = schedules(shape.weight_rows, self.multiprocessors)[0]
        tried = dict.fromkeys([chosen, *self.schedules(shape)])
        count, floor = len(self.addresses(shape)), shape.nbytes / BYTES_PER_SECOND

        def seconds(schedule: Schedule) -> float:
            graph = self.repeated(shape, lambda weight: self.fused(shape, tokens, weight, schedule))
            return self.seconds(graph, repeats=5)[0] / count

        times = {schedule: seconds(schedule) for schedule in tried}
        ranked = sorted(times, key=times.__getitem__)
        place = ranked.index(chosen)
        print(f"\n{shape.name}, {tokens} tokens: the chosen one is place {place + 1} of {len(ranked)}")
        for schedule in dict.fromkeys([chosen, *ranked[:shown]]):
            print(
                f"  rows {schedule.rows:4} run {schedule.run:3} blocks {schedule.blocks(shape.weight_rows):4}"
                f" ring {schedule.ring >> 10:4} KiB: {times[schedule] * 1e6:7.2f} us"
                f" {floor / times[schedule]:6.1%}",
                flush=True,
            )

    def schedules(self, shape: Shape) -> list[Schedule]:
        likely = schedules(shape.weight_rows, self.multiprocessors)
        return [replace(schedule, ring=ring) for schedule in likely for ring in RINGS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 16, 32, 64])
    parser.add_argument("--shapes", default="Llama", help="only shapes whose name contains this; '' for all")
    parser.add_argument("--sweep", type=int, nargs="*", default=[8, 64], help="tokens for ways to share the weights")
    arguments = parser.parse_args()
    bench = Bench()
    print(bench.device.name, bench.device.arch)
    print(
        f"{'us a launch':22} {'rows':>7} {'depth':>6} {'m':>4} {'floor':>8} {'plain':>8} {'fused':>8}"
        f" {'cuBLASLt':>8} {'TB/s':>6} {'of it':>7} {'fused':>7} {'cuBLAS':>7}"
    )
    for shape in (shape for shape in SHAPES if arguments.shapes in shape.name):
        for tokens in arguments.tokens:
            bench.compare(shape, tokens)
    for tokens in arguments.sweep:
        for shape in LLAMA[:4]:
            bench.sweep(shape, tokens)


if __name__ == "__main__":
    main()
