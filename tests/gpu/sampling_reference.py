"""Sampling in NumPy, by the order of operations that services/gpu_engine/cpu/sampling.hpp documents.

Sorts the whole vocabulary and looks at every token. float32 steps round as the kernel's do; a fused multiply-add is
computed in float64 and rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
F32 = np.float32


def choose(logits: Floats, row: Any, history: NDArray[np.uint32]) -> int:
    """The token of one row; ``history`` holds its prompt and output."""
    adjusted = adjust(logits, row, history)
    order = np.lexsort((np.arange(adjusted.size), -adjusted))
    top = adjusted[order[0]]
    if row["temperature"] == 0 or not top > -np.inf:
        return int(order[0])
    weights = weigh(adjusted, top, F32(1) / row["temperature"])
    mass = (weights.astype(np.float64) * 2.0**32).astype(np.uint64)
    kept = order[: int(row["top_k"]) or None]
    if row["top_p"] < 1:
        enough = int(float(row["top_p"]) * float(mass[kept].sum()))
        sums = np.cumsum(mass[kept])
        kept = kept[: int(np.searchsorted(sums, max(enough, 1))) + 1]
    kept = kept[(weights[kept] >= row["min_p"]) & (weights[kept] > 0)]
    if kept.size == 0:
        return int(order[0])
    words = philox(int(row["seed"]), kept // 4, int(row["history_length"]))[np.arange(kept.size), kept % 4]
    times = -np.log1p(-(words + 0.5) * 2.0**-32) / weights[kept]
    return int(kept[np.lexsort((kept, times))[0]])


def log_probabilities(logits: Floats) -> Floats:
    """Of the raw logits."""
    wide = logits.astype(np.float64)
    result: Floats = (wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())).astype(np.float32)
    return result


def adjust(logits: Floats, row: Any, history: NDArray[np.uint32]) -> Floats:
    adjusted = logits.copy()
    if row["repetition_penalty"] != 1 or row["presence_penalty"] != 0 or row["frequency_penalty"] != 0:
        seen = np.unique(history)
        penalty = row["repetition_penalty"]
        adjusted[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        used, uses = np.unique(history[int(row["prompt_tokens"]) :], return_counts=True)
        adjusted[used] -= row["frequency_penalty"] * uses.astype(np.float32)
        adjusted[used] -= row["presence_penalty"]
    adjusted[row["suppress"][: row["suppress_count"]]] = -np.inf
    return adjusted


def weigh(logits: Floats, top: np.float32, inverse_temperature: np.float32) -> Floats:
    with np.errstate(invalid="ignore"):
        x = (logits - top) * inverse_temperature
    weights: Floats = np.where(x > -80, exponential(np.maximum(x, F32(-87))), F32(0))
    return weights


def exponential(x: Floats) -> Floats:
    def fused(a: Any, b: Any, c: Any) -> Floats:
        wide = np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)
        return np.asarray(wide, np.float32)

    shifted = fused(x, F32(1.44269504088896341), F32(12582912))
    n = shifted - F32(12582912)
    r = fused(n, F32(-0.693359375), x)
    r = fused(n, F32(2.12194440e-4), r)
    y = fused(F32(1.9875691500e-4), r, F32(1.3981999507e-3))
    for term in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = fused(y, r, F32(term))
    y = fused(y, r * r, r) + F32(1)
    power = ((shifted.view(np.uint32) - np.uint32(0x4B400000) + np.uint32(127)) << np.uint32(23)).view(np.float32)
    result: Floats = y * power
    return result


def philox(seed: int, quads: NDArray[Any], position: int) -> NDArray[np.uint64]:
    """Philox4x32-10: words [quads, 4] of the counters (quad, position, 0, 0)."""
    mask = np.uint64(0xFFFFFFFF)
    a, b = quads.astype(np.uint64), np.full(quads.shape, position, np.uint64)
    c, d = np.zeros_like(a), np.zeros_like(a)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (p1 >> np.uint64(32)) ^ b ^ np.uint64(k0), p1 & mask
        c, d = (p0 >> np.uint64(32)) ^ d ^ np.uint64(k1), p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([a, b, c, d], axis=-1)
