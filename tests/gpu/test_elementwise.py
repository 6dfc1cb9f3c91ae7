"""Embedding, norms, rotary with the page write, and SwiGLU against float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Device, Stream
from services.gpu_engine.cuda.executor import rotary_table
from services.gpu_engine.models.rope import rotary_frequencies
from tests.gpu.steps import KernelBench, Rows, bfloat16_of, poisoned, relative_error

BF16_ERROR = 4e-3
ROWS: list[Rows] = [[(0, 1)], [(0, 16), (31, 1), (17, 40)], [(5, 3)] * 9]
HIDDEN = [64, 576, 4096, 5120]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_embedding_is_exact_and_leaves_rows_beyond_the_step_alone(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator, rows: Rows, hidden: int
) -> None:
    bench = KernelBench(device, compiler, rng, rows, hidden=hidden)
    table, values = bench.random(bench.config.vocabulary, hidden)
    residual = poisoned(4 * (bench.tokens + 5) * hidden)
    bench.kernels.embedding(stream, bench.tokens + 5, table.pointer, residual.pointer)
    found = residual.download(np.float32, (bench.tokens + 5, hidden))
    np.testing.assert_array_equal(found[: bench.tokens], values[bench.step.token_ids])
    assert np.isnan(found[bench.tokens :]).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator, rows: Rows, hidden: int, add: bool
) -> None:
    bench = KernelBench(device, compiler, rng, rows, hidden=hidden)
    stored = rng.standard_normal((bench.tokens, hidden)).astype(np.float32) * 3
    residual = Buffer.of(stored)
    delta, added = bench.random(bench.tokens, hidden)
    weight, factor = bench.random(hidden)
    out = poisoned(2 * bench.tokens * hidden)
    total = stored + added if add else stored.astype(np.float64)
    expected = total / np.sqrt((total**2).mean(1, keepdims=True) + bench.config.norm_eps) * factor
    bench.kernels.rms_norm(
        stream,
        bench.tokens,
        residual=residual.pointer,
        delta=delta.pointer if add else None,
        weight=weight.pointer,
        out=out.pointer,
    )
    assert relative_error(bfloat16_of(out, bench.tokens, hidden), expected) < BF16_ERROR
    assert relative_error(residual.download(np.float32, stored.shape), total) < 1e-6


@pytest.mark.parametrize("hidden", HIDDEN)
def test_final_norm_takes_the_last_token_of_each_sampled_row(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator, hidden: int
) -> None:
    bench = KernelBench(device, compiler, rng, [(0, 7), (3, 1), (0, 30), (9, 1)], hidden=hidden)
    sampled = np.array([3, 0, 2], np.int32)
    bench.arrays.sample_row.upload(sampled)
    bench.arrays.counts.upload(np.array([bench.tokens, 4, 3], np.uint32))
    values = rng.standard_normal((bench.tokens, hidden)).astype(np.float32)
    residual, out = Buffer.of(values), poisoned(2 * 4 * hidden)
    delta, added = bench.random(bench.tokens, hidden)
    weight, factor = bench.random(hidden)
    bench.kernels.final_norm(
        stream, 4, residual=residual.pointer, delta=delta.pointer, weight=weight.pointer, out=out.pointer
    )
    total = (values + added)[bench.step.row_start[sampled + 1] - 1]
    expected = total / np.sqrt((total**2).mean(1, keepdims=True) + bench.config.norm_eps) * factor
    found = bfloat16_of(out, 4, hidden)
    assert relative_error(found[:3], expected) < BF16_ERROR
    assert np.isnan(found[3]).all()


def test_a_norm_has_the_same_bits_alone_and_in_a_batch(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator
) -> None:
    bench = KernelBench(device, compiler, rng, [(0, 33)], hidden=4096)
    stored = rng.standard_normal((33, 4096)).astype(np.float32)
    delta, _ = bench.random(33, 4096)
    weight, _ = bench.random(4096)
    outs = []
    for first, count in ((0, 33), (32, 1)):
        residual, out = Buffer.of(stored), poisoned(2 * 33 * 4096)
        bench.arrays.counts.upload(np.array([count, 1, 1], np.uint32))
        bench.kernels.rms_norm(
            stream,
            count,
            residual=residual.pointer + 4 * first * 4096,
            delta=delta.pointer + 2 * first * 4096,
            weight=weight.pointer,
            out=out.pointer,
        )
        outs.append(out.download(np.uint16, (33, 4096))[count - 1])
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("rows", [*ROWS, [(15, 1), (16, 1), (0, 17)], [(131071, 1)]])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "partial", "normed"),
    [
        (4, 4, 64, 1.0, False),
        (9, 3, 64, 1.0, True),
        (8, 2, 128, 1.0, False),
        (8, 1, 128, 1.0, True),
        (40, 10, 128, 0.75, False),
        (10, 2, 64, 0.25, True),
    ],
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_rotary_turns_queries_and_writes_keys_and_values_into_their_pages(
    device: Device,
    stream: Stream,
    compiler: Compiler,
    rng: np.random.Generator,
    rows: Rows,
    heads: int,
    kv_heads: int,
    head_dim: int,
    partial: float,
    normed: bool,
    page_size: int,
) -> None:
    """The models' norms of each head's query and key come first; what is beyond the rotated dimensions stays."""
    geometry = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "partial_rotary": partial}
    bench = KernelBench(device, compiler, rng, rows, page_size=page_size, **geometry)
    model, step = bench.config, bench.step
    norms = [bench.random(head_dim) for _ in range(2)]
    turns = Buffer.of(rotary_table(model, int(step.positions.max()) + 1))
    width = bench.geometry.qkv_width
    qkv, values = bench.random(bench.tokens, width)
    pages = poisoned(bench.pages * bench.geometry.layer_page_bytes)
    bench.kernels.plan_attention(stream)
    weights = (norms[0][0].pointer, norms[1][0].pointer) if normed else (0, 0)
    bench.kernels.rotary(stream, bench.tokens + 5, qkv.pointer, pages.pointer, turns.pointer, norms=weights)

    split = values.reshape(bench.tokens, heads + 2 * kv_heads, head_dim)
    x = split.copy()
    if normed:
        x /= np.sqrt((x**2).mean(-1, keepdims=True) + model.norm_eps)
        x[:, :heads] *= norms[0][1]
        x[:, heads:] *= norms[1][1]
    angles = step.positions[:, None, None] * rotary_frequencies(model)[0]
    half = model.rotary_dim // 2
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = np.concatenate(
        [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles), rest], axis=-1
    )
    found = bfloat16_of(qkv, bench.tokens, heads + 2 * kv_heads, head_dim)
    assert relative_error(found[:, :heads], turned[:, :heads]) < BF16_ERROR

    cache = bfloat16_of(pages, bench.pages, 2, kv_heads, page_size, head_dim)
    token_row = np.repeat(np.arange(len(rows)), np.diff(step.row_start))
    page = step.page_table[step.sequence[token_row], step.positions // page_size]
    keys, stored = (cache[page, which, :, step.positions % page_size] for which in (0, 1))
    assert relative_error(keys, turned[:, heads : heads + kv_heads]) < BF16_ERROR
    np.testing.assert_array_equal(stored, split[:, heads + kv_heads :])
    cache[page, :, :, step.positions % page_size] = np.nan
    assert np.isnan(cache).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("ffn", [8, 1536, 14336])
def test_swiglu(
    device: Device, stream: Stream, compiler: Compiler, rng: np.random.Generator, rows: Rows, ffn: int
) -> None:
    bench = KernelBench(device, compiler, rng, rows, ffn=ffn)
    gate_up, values = bench.random(bench.tokens, 2 * ffn, scale=4.0)
    out = poisoned(2 * (bench.tokens + 1) * ffn)
    bench.kernels.swiglu(stream, bench.tokens, gate_up.pointer, out.pointer)
    assert (out.download(np.uint16, (bench.tokens + 1, ffn))[bench.tokens] == 0xFFFF).all()
    gate, up = values[:, :ffn], values[:, ffn:]
    assert relative_error(bfloat16_of(out, bench.tokens, ffn), gate / (1 + np.exp(-gate)) * up) < BF16_ERROR
