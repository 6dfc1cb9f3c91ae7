"""Drives the forward pass with steps made by hand, as the scheduling core would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.core._core import ROW_SAMPLING
from services.gpu_engine.cpu._kernels import Kernels
from services.gpu_engine.cpu.forward import Forward
from services.gpu_engine.cpu.kv_cache import KvCache
from services.gpu_engine.cpu.weights import Weights
from services.gpu_engine.models.checkpoint import Checkpoint

Ints = NDArray[np.int32]


@dataclass
class HandStep:
    token_ids: Ints
    positions: Ints
    row_start: Ints
    kv_length: Ints
    sequence: Ints
    page_table: Ints
    sample_row: Ints
    sampling: NDArray[np.void]
    history: NDArray[np.uint32]

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def rows(self) -> int:
        return len(self.sequence)

    @property
    def samples(self) -> int:
        return len(self.sample_row)


class Executor:
    """A forward pass whose sequences own shuffled pages.

    ``run`` takes for each sequence its next tokens and returns the logits of each one's last token.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        threads: int = 1,
        instruction_set: str = "",
        sequences: int = 8,
        context: int = 256,
        page_size: int = 16,
        seed: int = 0,
        fp8_kv: bool = False,
    ) -> None:
        per_sequence = -(-context // page_size)
        pages = sequences * per_sequence
        cache = KvCache(checkpoint.config, pages, page_size)
        for layer in (*cache.keys, *cache.values):
            layer.fill(np.nan)  # what was never written must never be used
        kernels = Kernels(threads, instruction_set)
        self.forward = Forward(
            checkpoint.config,
            Weights(checkpoint),
            kernels,
            cache,
            max_tokens=1024,
            max_samples=sequences,
            context=context,
            fp8_kv=[checkpoint.kv_scales(layer) for layer in range(checkpoint.config.layers)] if fp8_kv else None,
        )
        shuffled = np.random.default_rng(seed).permutation(pages)
        self.page_table = shuffled.reshape(sequences, per_sequence).astype(np.int32)
        self.lengths = [0] * sequences

    def run(self, rows: Mapping[int, Sequence[int]]) -> NDArray[np.float32]:
        step = self.step(rows)
        for sequence, tokens in rows.items():
            self.lengths[sequence] += len(tokens)
        return self.forward.run(step).copy()

    def step(self, rows: Mapping[int, Sequence[int]]) -> HandStep:
        counts = [len(tokens) for tokens in rows.values()]
        starts = [self.lengths[sequence] for sequence in rows]
        sampling = np.zeros(len(rows), ROW_SAMPLING)
        sampling["top_p"] = sampling["repetition_penalty"] = 1
        return HandStep(
            token_ids=np.concatenate([np.asarray(tokens, np.int32) for tokens in rows.values()]),
            positions=np.concatenate(
                [np.arange(start, start + count, dtype=np.int32) for start, count in zip(starts, counts, strict=True)]
            ),
            row_start=np.cumsum([0, *counts]).astype(np.int32),
            kv_length=np.add(starts, counts).astype(np.int32),
            sequence=np.array(list(rows), np.int32),
            page_table=self.page_table,
            sample_row=np.arange(len(rows), dtype=np.int32),
            sampling=sampling,
            history=np.zeros(1, np.uint32),
        )
