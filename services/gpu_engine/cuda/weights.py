"""A checkpoint's weights in device memory: bf16 or FP8, with the matrices that share an input stacked into one.

Quantized GGUF weights are dequantized while they load. Tensors stream through a bounded piece of host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.gpu_engine.cuda.bfloat16 import rows_as_bfloat16
from services.gpu_engine.cuda.driver import ALIGNMENT, Buffer
from services.gpu_engine.cuda.fp8_matrix import SCALE_COLUMNS, Fp8Matrix
from services.gpu_engine.cuda.geometry import BF16_BYTES
from services.gpu_engine.models.checkpoint import Progress
from services.gpu_engine.models.family import Attention, Embedding, FeedForward, Head, Layer, Mixture, TensorSpec
from services.gpu_engine.models.scale import Scale
from services.gpu_engine.models.tensors import StoredTensor

FP8_COLUMNS = 16  # a row of codes must be a multiple of so many long: of 16 bytes
SCALE_BYTES = 4
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


def fp8_stacks(layers: tuple[Layer, ...], stored: Collection[str]) -> frozenset[str]:
    """Of the tensors named in ``stored``, which a checkpoint has in FP8, those that stay so on the device.

    They are matrices of attention and dense feed-forward parts, if all of a stack are FP8 and a row is a multiple of 16
    long. Others are dequantized to bf16 as they load.
    """
    kept: set[str] = set()
    for layer in layers:
        if isinstance(layer, Attention | FeedForward):
            for stack in stacks_of(layer):
                if all(spec.name in stored for spec in stack) and stack[0].shape[-1] % FP8_COLUMNS == 0:
                    kept.update(spec.name for spec in stack)
    return frozenset(kept)


def weight_bytes(layers: tuple[Layer, ...], fp8: Collection[str] = ()) -> int:
    """What DeviceWeights allocates for these layers, with tensors ``fp8`` in FP8."""
    return _place(layers, fp8).end


def scratch_bytes(layers: tuple[Layer, ...], fp8: Collection[str]) -> int:
    """Of the largest stack in FP8, dequantized to bf16."""
    stacks = (stack for layer in layers for stack in stacks_of(layer) if stack[0].name in fp8)
    return max((sum(_elements(spec) for spec in stack) * BF16_BYTES for stack in stacks), default=0)


@dataclass(frozen=True)
class _Places:
    """Offsets: of each tensor, and of the scales of each stack in FP8, by the name of its first tensor."""

    tensors: dict[str, int]
    scales: dict[str, int]
    end: int


def _place(layers: tuple[Layer, ...], fp8: Collection[str]) -> _Places:
    offsets: dict[str, int] = {}
    scales: dict[str, int] = {}
    end = 0
    for stack in (stack for layer in layers for stack in stacks_of(layer)):
        end = _aligned(end)
        for spec in stack:
            if spec.name not in offsets:  # a tied head is the embedding again
                offsets[spec.name] = end
                end += _elements(spec) * (1 if spec.name in fp8 else BF16_BYTES)
        if stack[0].name in fp8:
            end = _aligned(end)
            scales[stack[0].name] = end
            end += SCALE_BYTES * _scale_blocks(stack) * _rows(stack)
    return _Places(offsets, scales, end)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _rows(stack: tuple[TensorSpec, ...]) -> int:
    return sum(spec.shape[0] for spec in stack)


def _scale_blocks(stack: tuple[TensorSpec, ...]) -> int:
    """Room for one scale of each row and 128 columns; a stack with one scale a row uses the first of them."""
    return -(-stack[0].shape[1] // SCALE_COLUMNS)


class DeviceWeights:
    """Loads every tensor of a checkpoint in one allocation.

    Args:
        fp8: names of tensors that stay in FP8, of ``fp8_stacks``.

    Raises:
        OutOfDeviceMemoryError: saying how much was needed.
    """

    def __init__(
        self, source: WeightSource, progress: Progress | None = None, fp8: Collection[str] = frozenset()
    ) -> None:
        self._places = _place(source.layers, fp8)
        self.nbytes = self._places.end
        self._memory = Buffer(self.nbytes, "the model's weights")
        self._matrices: dict[str, Fp8Matrix] = {}
        stacks = {spec.name: stack for layer in source.layers for stack in stacks_of(layer) for spec in stack}
        scales: dict[str, Scale] = {}
        for spec, tensor in source.tensors(progress):
            offset = self._places.tensors[spec.name]
            if spec.name not in fp8:
                self._load(offset, tensor)
                continue
            assert tensor.scale
            self._memory.upload(np.ascontiguousarray(tensor.data), offset)
            scales[spec.name] = tensor.scale
            stack = stacks[spec.name]
            if all(each.name in scales for each in stack):
                self._load_scales(stack, [scales.pop(each.name) for each in stack])

    def address(self, first: TensorSpec) -> int:
        """Where a tensor begins; of a stack, ask for its first."""
        return self._memory.pointer + self._places.tensors[first.name]

    def fp8(self, first: TensorSpec) -> Fp8Matrix | None:
        """The stack that begins with this tensor if it is in FP8."""
        return self._matrices.get(first.name)

    def _load_scales(self, stack: tuple[TensorSpec, ...], scales: list[Scale]) -> None:
        columns = stack[0].shape[1]
        blocks = max(scale.values.shape[1] for scale in scales)
        step = SCALE_COLUMNS if blocks > 1 else columns
        rows = [scale.of_rows(0, spec.shape[0], columns, step) for spec, scale in zip(stack, scales, strict=True)]
        offset = self._places.scales[stack[0].name]
        self._memory.upload(np.ascontiguousarray(np.concatenate(rows).T), offset)
        base = self._memory.pointer
        self._matrices[stack[0].name] = Fp8Matrix(self.address(stack[0]), base + offset, blocks)

    def _load(self, offset: int, tensor: StoredTensor) -> None:
        rows, columns = (1, *tensor.shape)[-2:]
        step = max(1, PIECE_ELEMENTS // columns)
        for start in range(0, rows, step):
            piece = rows_as_bfloat16(tensor, start, min(start + step, rows))
            self._memory.upload(piece, offset + start * columns * BF16_BYTES)
