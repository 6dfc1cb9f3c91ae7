"""A checkpoint's weights in device memory: bf16, with the matrices that share an input stacked into one.

Quantized GGUF weights are dequantized while they load. Tensors stream through a bounded piece of host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from services.gpu_engine.cuda.bfloat16 import rows_as_bfloat16
from services.gpu_engine.cuda.driver import ALIGNMENT, Buffer
from services.gpu_engine.cuda.geometry import BF16_BYTES
from services.gpu_engine.models.checkpoint import Progress
from services.gpu_engine.models.family import Attention, Embedding, FeedForward, Head, Layer, Mixture, TensorSpec
from services.gpu_engine.models.tensors import StoredTensor

PIECE_ELEMENTS = 16 << 20  # converted at a time


class WeightSource(Protocol):
    """What is read of a checkpoint."""

    @property
    def layers(self) -> tuple[Layer, ...]: ...

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[TensorSpec, StoredTensor]]: ...


def stacks_of(layer: Layer) -> tuple[tuple[TensorSpec, ...], ...]:
    """The layer's tensors; those of one tuple lie one below the other, as one matrix."""
    match layer:
        case Embedding(weight):
            return ((weight,),)
        case Attention():
            norms = tuple((norm,) for norm in (layer.norm, layer.query_norm, layer.key_norm) if norm)
            return *norms, (layer.query, layer.key, layer.value), (layer.output,)
        case FeedForward():
            return (layer.norm,), (layer.gate, layer.up), (layer.down,)
        case Mixture():
            gates = tuple(spec for expert in layer.experts for spec in (expert.gate, expert.up))
            return (layer.norm,), (layer.router,), gates, tuple(expert.down for expert in layer.experts)
        case Head():
            return (layer.norm,), (layer.weight,)


def _elements(spec: TensorSpec) -> int:
    rows, columns = (1, *spec.shape)[-2:]
    return rows * columns


def weight_bytes(layers: tuple[Layer, ...]) -> int:
    """What DeviceWeights allocates for these layers."""
    return _place(layers)[1]


def _place(layers: tuple[Layer, ...]) -> tuple[dict[str, int], int]:
    """Each tensor's offset by name, and the end."""
    offsets: dict[str, int] = {}
    end = 0
    for stack in (stack for layer in layers for stack in stacks_of(layer)):
        end = -(-end // ALIGNMENT) * ALIGNMENT
        for spec in stack:
            if spec.name not in offsets:  # a tied head is the embedding again
                offsets[spec.name] = end
                end += _elements(spec) * BF16_BYTES
    return offsets, end


class DeviceWeights:
    """Loads every tensor of a checkpoint in one allocation.

    Raises:
        OutOfDeviceMemoryError: saying how much was needed.
    """

    def __init__(self, source: WeightSource, progress: Progress | None = None) -> None:
        self._offsets, self.nbytes = _place(source.layers)
        self._memory = Buffer(self.nbytes, "the model's weights")
        for spec, tensor in source.tensors(progress):
            self._load(self._offsets[spec.name], tensor)

    def address(self, first: TensorSpec) -> int:
        """Where a tensor begins; of a stack, ask for its first."""
        return self._memory.pointer + self._offsets[first.name]

    def _load(self, offset: int, tensor: StoredTensor) -> None:
        rows, columns = (1, *tensor.shape)[-2:]
        step = max(1, PIECE_ELEMENTS // columns)
        for start in range(0, rows, step):
            piece = rows_as_bfloat16(tensor, start, min(start + step, rows))
            self._memory.upload(piece, offset + start * columns * BF16_BYTES)
