"""A checkpoint whose matrices are quantized to FP8 as they are read: e4m3, each output with a scale of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property

from services.gpu_engine.models import float8
from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.dequantize import dequantize
from services.gpu_engine.models.family import Attention, FeedForward, Layer, Mixture, TensorSpec
from services.gpu_engine.models.tensors import StoredTensor, TensorType


def quantized_specs(layers: tuple[Layer, ...]) -> Iterator[TensorSpec]:
    """The matrices of attention, feed-forward parts and experts: nearly all bytes of a model, nearly no outliers.

    Embedding, head and routers stay as they are, as in published FP8 checkpoints.
    """
    for layer in layers:
        match layer:
            case Attention():
                yield from (layer.query, layer.key, layer.value, layer.output)
            case FeedForward():
                yield from (layer.gate, layer.up, layer.down)
            case Mixture():
                for expert in layer.experts:
                    yield from (expert.gate, expert.up, expert.down)


class Fp8Weights(Checkpoint):
    """``source`` with its matrices in FP8; what is FP8 already is passed on."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source.path, source.config, source.tokenizer)
        self._source = source
        self._quantized = frozenset(spec.name for spec in quantized_specs(source.layers))

    def stored_name(self, spec: TensorSpec) -> str:
        return self._source.stored_name(spec)

    def stored_names(self) -> set[str]:
        return self._source.stored_names()

    def tensor(self, spec: TensorSpec) -> StoredTensor:
        stored = self._source.tensor(spec)
        if spec.name not in self._quantized or stored.type is TensorType.F8_E4M3:
            return stored
        codes, scale = float8.quantize_rows(dequantize(stored, 0, spec.shape[0]))
        return StoredTensor(spec.shape, TensorType.F8_E4M3, codes, scale)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        return self._source.kv_scales(layer)

    def fp8_names(self) -> frozenset[str]:
        return self._source.fp8_names() | self._quantized

    def stored_bytes(self) -> int:
        """Of all tensors, without quantizing any."""
        return sum(self._bytes_of(spec, tensor) for spec, tensor in self._source.tensors())

    def _bytes_of(self, spec: TensorSpec, stored: StoredTensor) -> int:
        if spec.name not in self._quantized or stored.type is TensorType.F8_E4M3:
            return stored.nbytes
        rows, columns = spec.shape
        return rows * columns + 4 * rows

    @cached_property
    def fingerprint(self) -> str:
        """Another than the source's: the model answers otherwise."""
        return hashlib.sha256(f"FP8 weights of {self._source.fingerprint}".encode()).hexdigest()
