"""Paged attention over ragged mixes against float64 NumPy, and its independence of the batch; pages in bf16 and FP8."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Device, Stream
from services.gpu_engine.engine import Precision
from tests.gpu.attention import BF16_ERROR, attend, run
from tests.gpu.steps import KernelBench, Rows, relative_error

MIXES: list[Rows] = [
    [(0, 1)],
    [(14, 1), (15, 1), (16, 1), (254, 1), (255, 1), (256, 1), (1000, 1)],
    [(0, 2), (0, 63), (0, 64), (0, 65), (1, 15)],
    [(0, 1), (0, 200), (700, 1), (33, 100), (511, 2), (640, 64), (3000, 1)],
    [(0, 127), (0, 128), (0, 129), (127, 2), (128, 2), (255, 130), (1, 1), (1000, 31)],  # blocks of 128 keys
]
SHAPES = [(4, 4, 64), (9, 3, 64), (8, 2, 128), (16, 2, 64), (8, 1, 128), (4, 4, 128), (10, 2, 128), (6, 2, 128)]


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", MIXES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("page_size", [16, 128])
def test_attention_of_a_ragged_step(
    device: Device,
    stream: Stream,
    compiler: Compiler,
    rng: np.random.Generator,
    rows: Rows,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    kv_cache: Precision,
) -> None:
    bench = KernelBench(
        device,
        compiler,
        rng,
        rows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        kv_cache=kv_cache,
    )
    qkv, queries = bench.random_projection(scale=2.0)
    pages, cache = bench.random_cache()
    expected = attend(bench, queries, cache)
    for layer in (1, 0, 1):  # again: the arrival counters and tickets must be back at zero
        found = run(bench, stream, qkv.pointer, pages.pointer, layer)
        for token in range(bench.tokens):
            assert relative_error(found[token], expected[token]) < BF16_ERROR, f"token {token} of {rows}"


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", [[(131071, 1)], [(16384, 1), (40000, 1), (20, 1)], [(32000, 70), (16383, 1)]])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_over_the_longest_contexts(
    device: Device,
    stream: Stream,
    compiler: Compiler,
    rng: np.random.Generator,
    rows: Rows,
    head_dim: int,
    kv_cache: Precision,
) -> None:
    bench = KernelBench(device, compiler, rng, rows, heads=4, kv_heads=1, head_dim=head_dim, kv_cache=kv_cache)
    qkv, queries = bench.random_projection(scale=4.0)
    pages, cache = bench.random_cache()
    expected = attend(bench, queries, cache)
    assert relative_error(run(bench, stream, qkv.pointer, pages.pointer), expected) < BF16_ERROR


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_prompt_of_more_tiles_than_multiprocessors(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator, head_dim: int, kv_cache: Precision
) -> None:
    bench = KernelBench(
        device, compiler, rng, [(0, 2900), (17, 1)], heads=16, kv_heads=8, head_dim=head_dim, kv_cache=kv_cache
    )
    qkv, queries = bench.random_projection(scale=2.0)
    pages, cache = bench.random_cache()
    expected = attend(bench, queries, cache)
    found = run(bench, stream, qkv.pointer, pages.pointer)
    for token in range(0, bench.tokens, 100):  # a tile in the wrong place must not hide in the mean
        assert relative_error(found[token], expected[token]) < BF16_ERROR, f"token {token}"
    assert relative_error(found, expected) < BF16_ERROR


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
def test_a_chunk_at_the_end_of_the_longest_context(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator, kv_cache: Precision
) -> None:
    rows = [(131072 - 40, 40), (9, 1), (0, 30)]
    bench = KernelBench(device, compiler, rng, rows, heads=4, kv_heads=1, head_dim=128, kv_cache=kv_cache)
    qkv, queries = bench.random_projection(scale=4.0)
    pages, cache = bench.random_cache()
    expected = attend(bench, queries, cache)
    found = run(bench, stream, qkv.pointer, pages.pointer)
    for token in range(bench.tokens):
        assert relative_error(found[token], expected[token]) < BF16_ERROR, f"token {token}"


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
def test_a_step_of_many_rows(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator, kv_cache: Precision
) -> None:
    rows = [(int(done), int(rng.choice([1, 3], p=[0.8, 0.2]))) for done in rng.integers(0, 90, 1500)]
    bench = KernelBench(device, compiler, rng, rows, heads=4, kv_heads=2, head_dim=64, kv_cache=kv_cache)
    qkv, queries = bench.random_projection()
    pages, cache = bench.random_cache()
    expected = attend(bench, queries, cache)
    assert relative_error(run(bench, stream, qkv.pointer, pages.pointer), expected) < BF16_ERROR


def test_kernels_keep_the_memory_that_they_point_to(
    device: Device, compiler: Compiler, rng: np.random.Generator
) -> None:
    bench = KernelBench(device, compiler, rng, [(0, 1)])
    kept = weakref.ref(bench.work), weakref.ref(bench.arrays)
    del bench.work, bench.arrays
    gc.collect()
    assert all(reference() for reference in kept)


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("segment_keys", [None, 512])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    device: Device,
    stream: Stream,
    compiler: Compiler,
    rng: np.random.Generator,
    segment_keys: int | None,
    kv_cache: Precision,
) -> None:
    rows = [(0, 100), (3000, 1), (5, 1), (700, 64), (20000, 1)]
    bench = KernelBench(
        device, compiler, rng, rows, heads=8, kv_heads=2, head_dim=128, segment_keys=segment_keys, kv_cache=kv_cache
    )
    qkv, _ = bench.random_projection()
    pages, _ = bench.random_cache()
    together = run(bench, stream, qkv.pointer, pages.pointer)
    step = bench.step
    for row, (_, count) in enumerate(rows):
        start = int(step.row_start[row])
        bench.arrays.counts.upload(np.array([count, 1, 1], np.uint32))
        bench.arrays.row_start.upload(np.array([0, count], np.int32))
        bench.arrays.kv_length.upload(step.kv_length[row : row + 1])
        bench.arrays.sequence.upload(step.sequence[row : row + 1])
        alone = run(bench, stream, qkv.pointer, pages.pointer, before=start)[:count]
        np.testing.assert_array_equal(alone, together[start : start + count], f"row {row}")


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 128), (9, 3, 64), (8, 1, 128)])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("segment_keys", [None, 256, 384])
def test_a_prompt_has_the_same_bits_whole_and_in_chunks(
    device: Device,
    stream: Stream,
    compiler: Compiler,
    rng: np.random.Generator,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    segment_keys: int | None,
    kv_cache: Precision,
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    bench = KernelBench(
        device, compiler, rng, [(0, 1100)], segment_keys=segment_keys, divided_tiles=8, **shape, kv_cache=kv_cache
    )
    qkv, _ = bench.random_projection()
    pages, _ = bench.random_cache()
    whole = run(bench, stream, qkv.pointer, pages.pointer)
    for cuts in ((0, 70, 72, 300, 1100), (0, 128, 512, 1024, 1100), (0, 2, 515, 1098, 1100)):
        for start, end in pairwise(cuts):
            bench.arrays.counts.upload(np.array([end - start, 1, 1], np.uint32))
            bench.arrays.row_start.upload(np.array([0, end - start], np.int32))
            bench.arrays.kv_length.upload(np.array([end], np.int32))
            chunk = run(bench, stream, qkv.pointer, pages.pointer, before=start)
            np.testing.assert_array_equal(chunk[: end - start], whole[start:end], f"{start} to {end} of {cuts}")
