"""The geometries that the benchmarks run, by name, and random weights for them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from services.gpu_engine.cuda.bfloat16 import to_bfloat16
from services.gpu_engine.cuda.driver import Device, check
from services.gpu_engine.models.checkpoint import FAMILIES, Progress
from services.gpu_engine.models.config import MixtureConfig, ModelConfig
from services.gpu_engine.models.family import Layer, TensorSpec, tensors_of
from services.gpu_engine.models.tensors import StoredTensor, TensorType


def _config(architecture: str, **numbers: Any) -> ModelConfig:
    values = {"context": 8192, "rope_scaling": None, "tied_embeddings": False, "eos_ids": (1,)}
    return ModelConfig(architecture=architecture, **(values | numbers))


MODELS = {
    "llama3-8b": _config(
        "llama",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        vocabulary=128256,
        norm_eps=1e-5,
        rope_base=500000.0,
    ),
    "phi4-15b": _config(
        "phi3",
        layers=40,
        hidden=5120,
        heads=40,
        kv_heads=10,
        head_dim=128,
        ffn=17920,
        vocabulary=100352,
        norm_eps=1e-5,
        rope_base=250000.0,
    ),
    "qwen3-32b": _config(
        "qwen3",
        layers=64,
        hidden=5120,
        heads=64,
        kv_heads=8,
        head_dim=128,
        ffn=25600,
        vocabulary=151936,
        norm_eps=1e-6,
        rope_base=1e6,
    ),
    "qwen3-30b-a3b": _config(
        "qwen3_moe",
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn=6144,
        vocabulary=151936,
        norm_eps=1e-6,
        rope_base=1e6,
        mixture=MixtureConfig(experts=128, per_token=8, ffn=768, normalized=True),
    ),
}


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the models to measure, all of them by default: ``--models NAME ...``."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    return parser


class RandomWeights:
    """Normal weights of a model with norms of 1, cut from one random pool that is pinned: 30 GB copy in a second.

    Matrices have a standard deviation of 1 / sqrt(inputs), so that activations keep their size through the layers.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.layers: tuple[Layer, ...] = FAMILIES[config.architecture](config)
        self._device = Device()  # its context, for pinned memory
        self._rng = np.random.default_rng()
        largest = max(int(np.prod(spec.shape)) for spec in tensors_of(self.layers))
        scale = np.float32(config.hidden**-0.5)
        tile = to_bfloat16(self._rng.standard_normal(1 << 24).astype(np.float32) * scale)
        self._pool = np.tile(tile, largest // tile.size + 2)
        self._ones = to_bfloat16(np.ones(config.hidden, np.float32))
        check("cuMemHostRegister", cu.cuMemHostRegister(self._pool.ctypes.data, self._pool.nbytes, 0))

    def __del__(self) -> None:
        if hasattr(self, "_ones"):
            cu.cuMemHostUnregister(self._pool.ctypes.data)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        del layer
        return 1.0, 1.0

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[TensorSpec, StoredTensor]]:
        for spec in tensors_of(self.layers):
            rows, columns = (1, *spec.shape)[-2:]
            start = int(self._rng.integers(0, 1 << 24))
            source = self._ones if len(spec.shape) == 1 else self._pool[start:]
            data = source[: rows * columns].reshape(rows, columns).view(np.uint8)
            yield spec, StoredTensor(spec.shape, TensorType.BF16, data)
