"""A checkpoint's tensors as the kernels want them: matrices packed, vectors in float32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.cpu._kernels import Arena, Linear, LinearGroup
from services.gpu_engine.models import family
from services.gpu_engine.models.checkpoint import Checkpoint, Progress
from services.gpu_engine.models.dequantize import PLAIN_TYPES, plain_values
from services.gpu_engine.models.errors import UnsupportedCheckpointError
from services.gpu_engine.models.family import TensorSpec
from services.gpu_engine.models.tensors import StoredTensor

Floats = NDArray[np.float32]
BLOCK_INPUTS = 32  # of a panel: kBlockInputs


@dataclass(frozen=True)
class Embedding:
    weight: Linear


@dataclass(frozen=True)
class Attention:
    index: int
    norm: Floats
    qkv: Linear
    output: Linear
    query_norm: Floats | None
    key_norm: Floats | None


@dataclass(frozen=True)
class FeedForward:
    norm: Floats
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Mixture:
    norm: Floats
    router: Linear
    gate_up: LinearGroup
    down: LinearGroup


@dataclass(frozen=True)
class Head:
    norm: Floats
    weight: Linear


Layer = Embedding | Attention | FeedForward | Mixture | Head


class Weights:
    """A model's layers with their weights in memory, in the types in which they are stored.

    Attributes:
        layers: in order of execution.
        bytes: of all weights.
    """

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self._total = checkpoint.stored_bytes() if progress else 0
        self._done = 0
        self._arena = Arena()
        self._matrices: dict[str, Linear] = {}
        self.layers = tuple(self._load(layer) for layer in checkpoint.layers)
        self.bytes = self._done

    def _load(self, layer: family.Layer) -> Layer:
        match layer:
            case family.Embedding(weight):
                return Embedding(self._linear(weight))
            case family.Attention(index, norm, query, key, value, output, query_norm, key_norm):
                return Attention(
                    index,
                    self._vector(norm),
                    self._linear(query, key, value),
                    self._linear(output),
                    self._vector(query_norm) if query_norm else None,
                    self._vector(key_norm) if key_norm else None,
                )
            case family.FeedForward(norm, gate, up, down):
                return FeedForward(self._vector(norm), self._linear(gate, up), self._linear(down))
            case family.Mixture(norm, router, experts):
                gate_up = self._group((expert.gate, expert.up) for expert in experts)
                return Mixture(
                    self._vector(norm), self._linear(router), gate_up, self._group((e.down,) for e in experts)
                )
            case family.Head(norm, weight):
                return Head(self._vector(norm), self._linear(weight))

    def _linear(self, *specs: TensorSpec) -> Linear:
        """Matrices side by side; the one of a tied head is that of the embedding."""
        name = "+".join(spec.name for spec in specs)
        if name not in self._matrices:
            self._matrices[name] = Linear(self._arena, *self._stored(*specs))
        return self._matrices[name]

    def _group(self, members: Iterable[tuple[TensorSpec, ...]]) -> LinearGroup:
        group = LinearGroup(self._arena)
        for specs in members:
            group.append(*self._stored(*specs))
        return group

    def _stored(self, *specs: TensorSpec) -> tuple[list[NDArray[np.uint8]], list[str], list[int], list[Floats | None]]:
        """Rows, types, inputs and scales, as ``Linear`` takes them."""
        tensors = [self._checkpoint.tensor(spec) for spec in specs]
        for tensor in tensors:
            self._count(tensor)
        scales = [_scale_of_blocks(tensor) for tensor in tensors]
        return [t.data for t in tensors], [t.type.name for t in tensors], [spec.shape[1] for spec in specs], scales

    def _vector(self, spec: TensorSpec) -> Floats:
        tensor = self._checkpoint.tensor(spec)
        self._count(tensor)
        if tensor.type in PLAIN_TYPES:
            return plain_values(tensor.data, tensor.type).reshape(-1).copy()
        raise UnsupportedCheckpointError(
            f"{self._checkpoint.path}: {spec.name} is a vector of {tensor.type.name}, must be F32, F16 or BF16"
        )

    def _count(self, tensor: StoredTensor) -> None:
        self._done += tensor.nbytes
        if self._progress:
            self._progress(self._done, self._total)


def _scale_of_blocks(tensor: StoredTensor) -> Floats | None:
    if tensor.scale is None:
        return None
    rows, columns = tensor.shape
    return tensor.scale.of_rows(0, rows, columns, BLOCK_INPUTS)
