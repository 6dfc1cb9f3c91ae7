"""The forward pass of every family in float64, written from the papers alone: no cache, no batching, no shared code."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.models.config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MixtureConfig,
    ModelConfig,
    YarnScaling,
)

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
        if config.mixture and layer not in config.mixture.dense_layers:
            x = x + _mixture(config.mixture, w, prefix + "ffn.", n)
        else:
            x = x + _feed_forward(w, prefix + "ffn.", n)
    head = w["embedding"] if config.tied_embeddings else w["head"]
    result: Doubles = _rms_norm(x, w["norm"], config.norm_eps) @ head.T
    return result


def _rms_norm(x: Doubles, weight: Doubles, eps: float) -> Doubles:
    result: Doubles = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return result


def _feed_forward(w: dict[str, Doubles], prefix: str, n: Doubles) -> Doubles:
    gate, up = n @ w[prefix + "gate"].T, n @ w[prefix + "up"].T
    result: Doubles = (gate / (1 + np.exp(-gate)) * up) @ w[prefix + "down"].T
    return result


def _mixture(mixture: MixtureConfig, w: dict[str, Doubles], prefix: str, n: Doubles) -> Doubles:
    logits = n @ w[prefix + "router"].T
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.zeros_like(n)
    for t, row in enumerate(p):
        chosen = np.argsort(-row, kind="stable")[: mixture.per_token]
        scale = row[chosen].sum() if mixture.normalized else 1.0
        for expert in chosen:
            out[t] += row[expert] / scale * _feed_forward(w, f"{prefix}experts.{expert}.", n[t])
    return out


def _attention(config: ModelConfig, w: dict[str, Doubles], prefix: str, n: Doubles) -> Doubles:
    length, dim = len(n), config.head_dim
    q = (n @ w[prefix + "query"].T).reshape(length, config.heads, dim)
    k = (n @ w[prefix + "key"].T).reshape(length, config.kv_heads, dim)
    if config.architecture.startswith("qwen3"):
        q = _rms_norm(q, w[prefix + "query_norm"], config.norm_eps)
        k = _rms_norm(k, w[prefix + "key_norm"], config.norm_eps)
    q, k = _rope(config, q), _rope(config, k)
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
    """Rotate as complex numbers: element i is the real part, i + half the imaginary part; the rest of a head stays."""
    half = config.rotary_dim // 2
    scale = 1.0
    thetas = [config.rope_base ** (-i / half) for i in range(half)]
    match config.rope_scaling:
        case LinearScaling(factor):
            thetas = [theta / factor for theta in thetas]
        case Llama3Scaling(factor, low, high, original):
            thetas = [_llama3(theta, factor, low, high, original) for theta in thetas]
        case LongRopeScaling(_, long, _, scale):  # the model's context is beyond the original one
            thetas = [theta / divisor for theta, divisor in zip(thetas, long, strict=True)]
        case YarnScaling(factor, original, scale, fast, slow):

            def index(turns: float) -> float:
                period = original / turns
                return config.head_dim * math.log(period / (2 * math.pi)) / (2 * math.log(config.rope_base))

            first, last = max(math.floor(index(fast)), 0), min(math.ceil(index(slow)), config.head_dim - 1)
            for i in range(half):
                slowed = min(max((i - first) / max(last - first, 0.001), 0), 1)
                thetas[i] = thetas[i] * (1 - slowed) + thetas[i] / factor * slowed
    turned = (
        (x[..., :half] + 1j * x[..., half : 2 * half])
        * np.exp(1j * np.outer(np.arange(len(x)), thetas))[:, None, :]
        * scale
    )
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def _llama3(theta: float, factor: float, low: float, high: float, original: int) -> float:
    wavelength = 2 * math.pi / theta
    if wavelength > original / low:
        return theta / factor
    if wavelength < original / high:
        return theta
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * theta / factor + smooth * theta
