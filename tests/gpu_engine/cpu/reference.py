"""A Llama forward pass in float64, written from the papers alone: no cache, no batching, no shared code."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.models.config import LinearScaling, Llama3Scaling, ModelConfig, YarnScaling

Doubles = NDArray[np.float64]


def logits(config: ModelConfig, weights: dict[str, NDArray[np.float32]], tokens: list[int]) -> Doubles:
    """Logits [tokens, vocabulary] of one sequence. ``weights`` go by canonical names."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    x = w["embedding"][tokens]
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        n = _rms_norm(x, w[prefix + "attention.norm"], config.norm_eps)
        x = x + _attention(config, w, prefix + "attention.", n)
        n = _rms_norm(x, w[prefix + "ffn.norm"], config.norm_eps)
        gate, up = n @ w[prefix + "ffn.gate"].T, n @ w[prefix + "ffn.up"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[prefix + "ffn.down"].T
    head = w["embedding"] if config.tied_embeddings else w["head"]
    result: Doubles = _rms_norm(x, w["norm"], config.norm_eps) @ head.T
    return result


def _rms_norm(x: Doubles, weight: Doubles, eps: float) -> Doubles:
    result: Doubles = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return result


def _attention(config: ModelConfig, w: dict[str, Doubles], prefix: str, n: Doubles) -> Doubles:
    length, dim = len(n), config.head_dim
    q = _rope(config, (n @ w[prefix + "query"].T).reshape(length, config.heads, dim))
    k = _rope(config, (n @ w[prefix + "key"].T).reshape(length, config.kv_heads, dim))
    v = (n @ w[prefix + "value"].T).reshape(length, config.kv_heads, dim)
    out = np.zeros_like(q)
    for head in range(config.heads):
        kv_head = head // (config.heads // config.kv_heads)
        for t in range(length):
            scores = k[: t + 1, kv_head] @ q[t, head] / math.sqrt(dim)
            p = np.exp(scores - scores.max())
            out[t, head] = p @ v[: t + 1, kv_head] / p.sum()
    result: Doubles = out.reshape(length, -1) @ w[prefix + "output"].T
    return result


def _rope(config: ModelConfig, x: Doubles) -> Doubles:
    """Rotate as complex numbers: element i is the real part, i + head_dim / 2 the imaginary part."""
    half = config.head_dim // 2
    scale = 1.0
    thetas = [config.rope_base ** (-2 * i / config.head_dim) for i in range(half)]
    match config.rope_scaling:
        case LinearScaling(factor):
            thetas = [theta / factor for theta in thetas]
        case Llama3Scaling(factor, low, high, original):
            thetas = [_llama3(theta, factor, low, high, original) for theta in thetas]
        case YarnScaling(factor, original, scale, fast, slow):

            def index(turns: float) -> float:
                period = original / turns
                return config.head_dim * math.log(period / (2 * math.pi)) / (2 * math.log(config.rope_base))

            first, last = max(math.floor(index(fast)), 0), min(math.ceil(index(slow)), config.head_dim - 1)
            for i in range(half):
                slowed = min(max((i - first) / max(last - first, 0.001), 0), 1)
                thetas[i] = thetas[i] * (1 - slowed) + thetas[i] / factor * slowed
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.outer(np.arange(len(x)), thetas))[:, None, :] * scale
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _llama3(theta: float, factor: float, low: float, high: float, original: int) -> float:
    wavelength = 2 * math.pi / theta
    if wavelength > original / low:
        return theta / factor
    if wavelength < original / high:
        return theta
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * theta / factor + smooth * theta
