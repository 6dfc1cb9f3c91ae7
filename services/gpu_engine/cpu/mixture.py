"""One mixture-of-experts layer: rows are grouped by expert, so each expert in use reads its weights once a step."""

from __future__ import annotations

import numpy as np

from services.gpu_engine.cpu._kernels import Kernels
from services.gpu_engine.cpu.weights import Floats, Mixture
from services.gpu_engine.models.config import MixtureConfig


class MixtureLayer:
    """Executes mixture layers of one model; the buffers are reused.

    A token's result depends on that token alone, bit for bit: an expert's product does not depend on its other rows,
    and the results of a token's experts are added in the order of their weights.
    """

    def __init__(self, mixture: MixtureConfig, hidden: int, kernels: Kernels, max_tokens: int) -> None:
        self._mixture = mixture
        self._kernels = kernels
        chosen = mixture.per_token
        self._logits = np.zeros((max_tokens, mixture.experts), np.float32)
        self._experts = np.zeros((max_tokens, chosen), np.int32)
        self._weights = np.zeros((max_tokens, chosen), np.float32)
        self._places = np.zeros(max_tokens * chosen, np.int32)
        self._grouped = np.zeros((max_tokens * chosen, hidden), np.float32)
        self._gate_up = np.zeros((max_tokens * chosen, 2 * mixture.ffn), np.float32)
        self._gated = np.zeros((max_tokens * chosen, mixture.ffn), np.float32)

    def run(self, layer: Mixture, normed: Floats, tokens: int, hidden: Floats) -> None:
        """hidden [tokens, hidden] += the mixture of normed [tokens, hidden]."""
        kernels, chosen, rows = self._kernels, self._mixture.per_token, tokens * self._mixture.per_token
        kernels.linear(layer.router, normed, tokens, self._logits)
        kernels.route(self._logits, tokens, self._mixture.normalized, self._experts, self._weights)
        experts = self._experts[:tokens].reshape(-1)
        order = np.argsort(experts, kind="stable")  # of (token, choice) pairs
        row_start = np.searchsorted(experts[order], np.arange(self._mixture.experts + 1)).astype(np.int32)
        self._places[order] = np.arange(rows, dtype=np.int32)
        np.take(normed, order // chosen, axis=0, out=self._grouped[:rows], mode="clip")
        kernels.grouped_linear(layer.gate_up, row_start, self._grouped, self._gate_up)
        kernels.swiglu(self._gate_up, rows, self._gated)
        kernels.grouped_linear(layer.down, row_start, self._gated, self._grouped)
        kernels.combine(self._grouped, self._places.reshape(-1, chosen), self._weights, tokens, hidden)
