"""Attention of a bench's step, by the kernels and in float64 NumPy."""

from __future__ import annotations

import numpy as np

from services.gpu_engine.cuda.driver import Stream
from tests.gpu.steps import Floats, KernelBench, bfloat16_of, poisoned

BF16_ERROR = 6e-3


def attend(bench: KernelBench, queries: Floats, cache: Floats) -> Floats:
    """softmax(q k / sqrt(d)) v of every token over its row's earlier tokens and itself, [tokens, heads, head_dim]."""
    model, size, step = bench.config, bench.geometry.page_size, bench.step
    out = np.empty((bench.tokens, model.heads, model.head_dim))
    for row, (computed, count) in enumerate(bench.rows):
        positions = np.arange(computed + count)
        pages = step.page_table[step.sequence[row], positions // size]
        keys, values = (cache[pages, which, :, positions % size] for which in (0, 1))
        start = step.row_start[row]
        visible = positions[None, :] <= (computed + np.arange(count))[:, None]
        for head in range(model.heads):
            kv = head // bench.geometry.group
            scores = queries[start : start + count, head] @ keys[:, kv].T / np.sqrt(model.head_dim)
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[start : start + count, head] = weights @ values[:, kv] / weights.sum(1, keepdims=True)
    return out


def run(bench: KernelBench, stream: Stream, qkv: int, pages: int, layer: int = 0, before: int = 0) -> Floats:
    """What attention writes for the step's tokens, whose projection begins ``before`` tokens into ``qkv``."""
    model, rest = bench.config, bench.tokens - before
    out = poisoned(2 * bench.tokens * model.query_width)
    bench.kernels.plan_attention(stream)
    bench.kernels.attention(
        stream,
        layer,
        qkv=qkv + 2 * before * bench.geometry.qkv_width,
        tokens=rest,
        layer_pages=pages,
        pages=bench.pages,
        out=out.pointer,
        scales=bench.scales,
    )
    return bfloat16_of(out, bench.tokens, model.heads, model.head_dim)
