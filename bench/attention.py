"""Attention alone at Llama-3-8B geometry, against what the card can do: ``python -m bench.attention [--kv-cache fp8]``.

One launch of each of eight layers in a graph, so pages come from memory and not from the cache. Every case is timed
twice, the smaller median first. A fraction is of whichever bound is nearer: keys, values, queries and results moved
once, or operations on visible (query, key) pairs alone, at the rates of ``bench.gpu_kernels``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from bench.families import MODELS
from bench.gpu_kernels import Cost, greedy, random_cache
from bench.timing import replay_seconds
from services.gpu_engine.cuda.attention_work import AttentionWork
from services.gpu_engine.cuda.bfloat16 import to_bfloat16
from services.gpu_engine.cuda.compiler import Compiler, default_cache
from services.gpu_engine.cuda.driver import Buffer, Device, Stream
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.kernels import Kernels
from services.gpu_engine.cuda.step_arrays import HostStep, StepArrays, StepLimits
from services.gpu_engine.engine import Precision

LAYERS = 8
Rows = Sequence[tuple[int, int]]
"""(tokens in the cache, tokens of this step) of each row."""

PREFILL: dict[str, Rows] = {
    "prompt of 128": [(0, 128)],
    "prompt of 512": [(0, 512)],
    "prompt of 2,048": [(0, 2048)],
    "prompt of 7,000": [(0, 7000)],
    "prompt of 32,768": [(0, 32768)],
    "last 2,048 of 32,768": [(30720, 2048)],
    "last 256 of 32,768": [(32512, 256)],
    "8 prompts of 256": [(0, 256)] * 8,
}
MIXED: dict[str, Rows] = {
    "64 x 1,024, prompt of 2,048": [(1023, 1)] * 64 + [(0, 2048)],
    "64 x 1,024, 2 prompts, end of 32,768": [(1023, 1)] * 64 + [(0, 700), (0, 700), (32512, 256)],
}
DECODE: dict[str, Rows] = {
    f"{batch} x {context:,}": [(context - 1, 1)] * batch
    for batch, context in (
        *((1, 192), (1, 2048), (1, 8192), (1, 131072), (4, 32768), (8, 4096), (32, 192), (32, 2048)),
        *((128, 192), (128, 1024), (256, 192), (256, 1024)),
    )
}


def random_queries(count: int, kv_cache: Precision) -> Buffer:
    """Normal values as attention reads them."""
    values = np.random.default_rng().standard_normal(1 << 24).astype(np.float32)
    tile = values.astype(np.float16).view(np.uint16) if kv_cache == "fp8" else to_bfloat16(values)
    buffer = Buffer(2 * count)
    for start in range(0, count, tile.size):
        buffer.upload(tile[: count - start], 2 * start)
    return buffer


class AttentionBench:
    """Random pages and queries, and the kernels over them."""

    def __init__(self, page_size: int, kv_cache: Precision) -> None:
        self.device, self.stream = Device(), Stream()
        config = self.config = replace(MODELS["llama3-8b"], layers=LAYERS)
        self.geometry = Geometry(config, page_size, kv_cache)
        cases = [*PREFILL.values(), *MIXED.values(), *DECODE.values()]
        self.limits = StepLimits(
            tokens=max(sum(count for _, count in rows) for rows in cases),
            rows=max(map(len, cases)),
            pages_per_sequence=-(-max(sum(row) for rows in cases for row in rows) // page_size),
        )
        self.pages = max(sum(-(-sum(row) // page_size) for row in rows) for rows in cases)
        self.arrays = StepArrays(self.limits)
        self.work = AttentionWork(self.geometry, self.limits)
        compiler = Compiler(self.device.arch, default_cache())
        self.kernels = Kernels(self.device, self.geometry, compiler, self.arrays.addresses, self.work)
        self.cache = random_cache(self.pages * self.geometry.page_bytes, kv_cache)
        self.qkv = random_queries(self.limits.tokens * self.geometry.qkv_width, kv_cache)
        self.out = Buffer(2 * self.limits.tokens * config.query_width)

    def upload(self, rows: Rows) -> None:
        rng = np.random.default_rng()
        table = np.zeros((self.limits.rows, self.limits.pages_per_sequence), np.int32)
        free = rng.permutation(self.pages)
        for line, row in enumerate(rows):
            needed = -(-sum(row) // self.geometry.page_size)
            table[line, :needed], free = free[:needed], free[needed:]
        counts = [count for _, count in rows]
        self.arrays.upload(
            HostStep(
                token_ids=np.zeros(sum(counts), np.int32),
                positions=np.concatenate([np.arange(a, a + n) for a, n in rows]).astype(np.int32),
                row_start=np.cumsum([0, *counts]).astype(np.int32),
                kv_length=np.array([sum(row) for row in rows], np.int32),
                sequence=np.arange(len(rows), dtype=np.int32),
                page_table=table,
                sample_row=np.arange(len(rows), dtype=np.int32),
                sampling=greedy(len(rows)),
                history=np.zeros(1, np.uint32),
            )
        )

    def cost(self, rows: Rows) -> Cost:
        config = self.config
        keys, tokens = sum(map(sum, rows)), sum(count for _, count in rows)
        pairs = sum(n * a + n * (n + 1) / 2 for a, n in rows)
        cached = 2 * keys * config.kv_heads * self.geometry.key_bytes
        return Cost(cached + 4 * tokens * config.query_width, 4 * pairs * config.query_width)

    def seconds(self, rows: Rows) -> float:
        """Of one layer."""
        tokens, layer_bytes = sum(count for _, count in rows), self.pages * self.geometry.layer_page_bytes

        def launch(layers: int) -> None:
            self.kernels.plan_attention(self.stream)  # resets the layers' tickets
            for layer in range(layers):
                self.kernels.attention(
                    self.stream,
                    layer,
                    qkv=self.qkv.pointer,
                    tokens=tokens,
                    layer_pages=self.cache.pointer + layer * layer_bytes,
                    pages=self.pages,
                    out=self.out.pointer,
                )

        plan = replay_seconds(self.stream, lambda: launch(0))
        return (replay_seconds(self.stream, lambda: launch(LAYERS)) - plan) / LAYERS

    def report(self, title: str, cases: dict[str, Rows]) -> None:
        print(f"\n{title:38} {'us':>18} {'MB':>8} {'TB/s':>6} {'TFLOP/s':>8} {'of bound':>9}")
        for name, rows in cases.items():
            self.upload(rows)
            cost, times = self.cost(rows), sorted(self.seconds(rows) for _ in range(2))
            print(
                f"{name:38} {times[0] * 1e6:8.1f} {times[1] * 1e6:9.1f} {cost.moved / 1e6:8.1f}"
                f" {cost.moved / times[0] / 1e12:6.2f} {cost.operations / times[0] / 1e12:8.1f}"
                f" {cost.floor / times[0]:9.1%}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--kv-cache", choices=get_args(Precision), default="bf16")
    arguments = parser.parse_args()
    bench = AttentionBench(arguments.page_size, arguments.kv_cache)
    print(bench.device.name, bench.device.arch, f"page size {bench.geometry.page_size}, KV cache {arguments.kv_cache}")
    bench.report("prefill", PREFILL)
    bench.report("mixed", MIXED)
    bench.report("decode", DECODE)


if __name__ == "__main__":
    main()
