"""The forward pass: a model's layers over one ragged step.

This file says which operations run in which order; ``_kernels`` does the arithmetic. A cuda engine executes the same
layers with its own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.cpu._kernels import Kernels
from services.gpu_engine.cpu.kv_cache import KvCache
from services.gpu_engine.cpu.mixture import MixtureLayer
from services.gpu_engine.cpu.weights import Attention, Embedding, FeedForward, Floats, Head, Mixture, Weights
from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.rope import rotary_frequencies
from services.gpu_engine.step import Ints, Step


class Forward:
    """Executes a model. One call at a time; the buffers are reused.

    Args:
        max_tokens: tokens of the largest step.
        max_samples: sampled rows of the largest step.
        context: tokens of the longest sequence; the model's own limit if None.
        fp8_kv: for each attention layer what keys and values are divided by before they are rounded to e4m3; None
            keeps them as they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        cache: KvCache,
        *,
        max_tokens: int,
        max_samples: int,
        context: int | None = None,
        fp8_kv: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        self._config = config
        self._fp8_kv = fp8_kv
        self._layers = weights.layers
        self._kernels = kernels
        self._cache = cache
        self._frequencies, self._rope_factor = rotary_frequencies(config, context)
        self._hidden = _buffer(max_tokens, config.hidden)
        self._normed = _buffer(max_tokens, config.hidden)
        self._qkv = _buffer(max_tokens, config.query_width + 2 * config.kv_width)
        self._attended = _buffer(max_tokens, config.query_width)
        self._gate_up = _buffer(max_tokens, 2 * config.ffn)
        self._gated = _buffer(max_tokens, config.ffn)
        self._mixture = config.mixture and MixtureLayer(config.mixture, config.hidden, kernels, max_tokens)
        self._logits = _buffer(max_samples, config.vocabulary)

    def run(self, step: Step, between_layers: Callable[[], None] = lambda: None) -> Floats:
        """Compute the step, filling its part of the KV cache.

        Args:
            between_layers: called before each layer, a few hundred microseconds apart for small steps.

        Returns:
            logits [samples, vocabulary] of the sampled rows' last tokens; valid until the next call.
        """
        kernels, config, tokens = self._kernels, self._config, step.tokens
        batch = _Batch(step, self._frequencies, self._rope_factor, self._cache.page_size)
        for layer in self._layers:
            between_layers()
            match layer:
                case Embedding(weight):
                    kernels.embed(weight, step.token_ids, tokens, self._hidden)
                case Attention():
                    self._attend(layer, step, batch)
                case FeedForward(norm, gate_up, down):
                    kernels.rms_norm(self._hidden, norm, config.norm_eps, tokens, self._normed)
                    kernels.linear(gate_up, self._normed, tokens, self._gate_up)
                    kernels.swiglu(self._gate_up, tokens, self._gated)
                    kernels.linear(down, self._gated, tokens, self._hidden, accumulate=True)
                case Mixture(norm):
                    assert self._mixture
                    kernels.rms_norm(self._hidden, norm, config.norm_eps, tokens, self._normed)
                    self._mixture.run(layer, self._normed, tokens, self._hidden)
                case Head(norm, weight):
                    last = np.ascontiguousarray(self._hidden[step.row_start[step.sample_row + 1] - 1])
                    kernels.rms_norm(last, norm, config.norm_eps, step.samples, self._normed)
                    kernels.linear(weight, self._normed, step.samples, self._logits)
        return self._logits[: step.samples]

    def _attend(self, layer: Attention, step: Step, batch: _Batch) -> None:
        kernels, config, tokens = self._kernels, self._config, step.tokens
        keys, values = self._cache.keys[layer.index], self._cache.values[layer.index]
        kernels.rms_norm(self._hidden, layer.norm, config.norm_eps, tokens, self._normed)
        kernels.linear(layer.qkv, self._normed, tokens, self._qkv)
        kernels.rotate_and_store(
            self._qkv,
            config.heads,
            batch.cosines,
            batch.sines,
            batch.slots,
            tokens,
            keys,
            values,
            layer.query_norm,
            layer.key_norm,
            config.norm_eps,
            self._fp8_kv[layer.index] if self._fp8_kv else None,
        )
        kernels.attend(
            self._qkv,
            config.heads,
            batch.lengths,
            batch.sequences,
            step.page_table,
            tokens,
            keys,
            values,
            self._attended,
        )
        kernels.linear(layer.output, self._attended, tokens, self._hidden, accumulate=True)


class _Batch:
    """What every layer needs to know of each token of a step."""

    def __init__(self, step: Step, frequencies: NDArray[np.float64], rope_factor: float, page_size: int) -> None:
        positions = step.positions
        self.lengths: Ints = positions + 1
        self.sequences: Ints = np.repeat(step.sequence, np.diff(step.row_start))
        pages = step.page_table[self.sequences, positions // page_size]
        self.slots: Ints = pages * page_size + positions % page_size
        angles = positions[:, None] * frequencies
        self.cosines = (np.cos(angles) * rope_factor).astype(np.float32)
        self.sines = (np.sin(angles) * rope_factor).astype(np.float32)


def _buffer(rows: int, columns: int) -> Floats:
    return np.zeros((max(rows, 1), columns), np.float32)
