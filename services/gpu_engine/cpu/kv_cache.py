"""The paged KV cache of the cpu engine."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.models.config import ModelConfig

FLOAT_BYTES = 4


def page_bytes(config: ModelConfig, page_size: int) -> int:
    """Bytes of one KV page over all layers."""
    return 2 * config.layers * config.kv_width * page_size * FLOAT_BYTES


class KvCache:
    """float32 keys and values of every layer, in pages of ``page_size`` positions.

    They are float32 whatever precision they were rounded to: an FP8 cache is here to know its accuracy.

    Memory is reserved at once, page aligned, and taken from the system as pages are first written.

    Attributes:
        keys: for each layer [pages, kv_heads, head_dim, page_size], so that neighbouring positions are neighbours.
        values: for each layer [pages, kv_heads, page_size, head_dim].
    """

    def __init__(self, config: ModelConfig, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.bytes = pages * page_bytes(config, page_size)
        memory = np.frombuffer(mmap.mmap(-1, self.bytes), np.float32)
        shape = (config.layers, 2, pages, config.kv_heads, config.head_dim * page_size)
        layers: NDArray[np.float32] = memory.reshape(shape)
        self.keys = [layer[0].reshape(pages, config.kv_heads, config.head_dim, page_size) for layer in layers]
        self.values = [layer[1].reshape(pages, config.kv_heads, page_size, config.head_dim) for layer in layers]
