"""Prefill tiles over many keys, summed in segments; and steps whose blocks share tiles and splits."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")

from services.gpu_engine.cuda.attention_work import BLOCK_KEYS, TILE_ROWS
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Device, Stream
from services.gpu_engine.engine import Precision
from tests.gpu.attention import BF16_ERROR, attend, run
from tests.gpu.steps import Floats, KernelBench, Rows, relative_error

SHAPES = [(8, 2, 128), (9, 3, 64), (4, 4, 128), (8, 1, 64)]
MIXES: list[Rows] = [
    [(0, 1100)],
    [(0, 300), (1100, 3), (255, 2), (500, 1), (3000, 40), (254, 3), (900, 130)],
]
WHOLE = 0xFFFFFFFF


def random_step(bench: KernelBench) -> tuple[int, int, Floats, object]:
    """Addresses of a random projection and of random pages, what attention must make of them, and their owners."""
    qkv, queries = bench.random_projection(scale=2.0)
    pages, cache = bench.random_cache()
    return qkv.pointer, pages.pointer, attend(bench, queries, cache), (qkv, pages)


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", MIXES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("segment_keys", [128, 256, 640])
def test_segments_are_right_and_have_the_same_bits_in_one_block_and_in_many(
    device: Device,
    stream: Stream,
    compiler: Compiler,
    rng: np.random.Generator,
    rows: Rows,
    heads: int,
    kv_heads: int,
    head_dim: int,
    segment_keys: int,
    kv_cache: Precision,
) -> None:
    bench = KernelBench(
        device, compiler, rng, rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kv_cache=kv_cache
    )
    qkv, pages, expected, _kept = random_step(bench)
    results = []
    for divided_tiles in (0, 5, 64):  # none; some of the rows; all
        bench.divide(segment_keys=segment_keys, divided_tiles=divided_tiles)
        # Again: the counters must be back at zero.
        results += [run(bench, stream, qkv, pages, layer) for layer in (1, 0, 1)]
    for token in range(bench.tokens):
        assert relative_error(results[0][token], expected[token]) < BF16_ERROR, f"token {token} of {rows}"
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_a_short_context_has_the_same_bits_beside_the_first_border_of_segments(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator
) -> None:
    """Tokens before the border, in a tile whose last ones lie behind it, against a tile of their own."""
    bench = KernelBench(device, compiler, rng, [(200, 70)], heads=8, kv_heads=2, head_dim=128)
    qkv, pages, _, _kept = random_step(bench)
    bench.divide(segment_keys=256)
    behind = run(bench, stream, qkv, pages)
    bench.divide()
    np.testing.assert_array_equal(run(bench, stream, qkv, pages)[:56], behind[:56])


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("divided_tiles", [0, 64])
def test_many_splits_beside_many_tiles(
    device: Device,
    stream: Stream,
    compiler: Compiler,
    rng: np.random.Generator,
    divided_tiles: int,
    kv_cache: Precision,
) -> None:
    rows = [(int(done), 1) for done in rng.integers(0, 1500, 300)] + [(0, 700), (1200, 90), (0, 33)]
    rng.shuffle(rows)
    bench = KernelBench(device, compiler, rng, rows, heads=16, kv_heads=8, head_dim=64, kv_cache=kv_cache)
    bench.divide(segment_keys=512, divided_tiles=divided_tiles)
    qkv, pages, expected, _kept = random_step(bench)
    overlapping = Stream(overlap=True)
    first = run(bench, stream, qkv, pages)
    for token in range(bench.tokens):
        assert relative_error(first[token], expected[token]) < BF16_ERROR, f"token {token}"
    for _ in range(5):
        np.testing.assert_array_equal(run(bench, overlapping, qkv, pages), first)


@pytest.mark.parametrize("divided_tiles", [0, 3, 100])
def test_the_plan_covers_every_tile_once_with_the_longest_items_first(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator, divided_tiles: int
) -> None:
    rows = [(0, 500), (3000, 40), (7, 1), (0, 20), (1000, 130), (600, 1), (20, 2)]
    bench = KernelBench(device, compiler, rng, rows, heads=8, kv_heads=2, head_dim=64)
    bench.divide(segment_keys=512, divided_tiles=divided_tiles)
    bench.kernels.plan_attention(stream)
    stream.synchronize()
    count, splits = map(int, bench.work.counts.download(np.uint32, (2,)))
    assert splits == 1 + 2
    items = bench.work.tiles.download(np.uint32, (count, 8))
    tile_tokens, segment = TILE_ROWS // bench.geometry.group, bench.work.segment_blocks
    lengths, found, slots = [], [], []
    for row, _, _, tokens, kv_length, first, partial, split in items.tolist():
        blocks = -(-(kv_length - tokens + min(first + tile_tokens, tokens)) // BLOCK_KEYS)
        segments = -(-blocks // segment)
        shares = range(segments) if partial == WHOLE else [split]
        lengths.append(blocks if partial == WHOLE else min(segment, blocks - split * segment))
        found += [(row, first, share) for share in shares]
        slots += [partial + share for share in shares if partial != WHOLE]
    assert lengths == sorted(lengths, reverse=True)  # below 16 blocks every length is a class of its own
    assert len(set(slots)) == len(slots)
    assert all(slot < bench.work.slots for slot in slots)
    assert sorted(found) == [
        (row, first, share)
        for row, (done, tokens) in enumerate(rows)
        if tokens > 1
        for first in range(0, tokens, tile_tokens)
        for share in range(-(-(done + min(first + tile_tokens, tokens)) // (segment * BLOCK_KEYS)))
    ]
