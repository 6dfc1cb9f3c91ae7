"""The vocabulary in which a model family is described: layers, and the tensors they need.

A family is a function from a config to a tuple of layers. Engines execute the layers in order; readers find the
tensors under the names of their own format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from services.gpu_engine.models.config import ModelConfig


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model.

    Attributes:
        shape: (outputs, inputs) of a matrix, (width,) of a vector.
        rotary_heads: heads whose rotary pairs the rows hold. GGUF stores the pairs of such a tensor interleaved,
            (i, i + 1), Hugging Face half a head apart, (i, i + head_dim / 2); readers deliver the latter. 0: no pairs.
        first_row, stored_rows: where in a fused Hugging Face tensor of so many rows this one begins. 0 stored rows: the
            tensor is stored by itself.
    """

    name: str
    shape: tuple[int, ...]
    gguf: str
    hugging_face: str
    rotary_heads: int = 0
    first_row: int = 0
    stored_rows: int = 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the Hugging Face tensor that holds this one."""
        return (self.stored_rows, *self.shape[1:]) if self.stored_rows else self.shape


@dataclass(frozen=True)
class Embedding:
    """hidden = weight[token]"""

    weight: TensorSpec


@dataclass(frozen=True)
class Attention:
    """hidden += output @ attend(rope(query @ n), rope(key @ n), value @ n), n = rms_norm(hidden); grouped queries.

    With query_norm and key_norm [head_dim], each head's query and key pass an RMS norm of their own before rope.
    """

    index: int
    norm: TensorSpec
    query: TensorSpec
    key: TensorSpec
    value: TensorSpec
    output: TensorSpec
    query_norm: TensorSpec | None = None
    key_norm: TensorSpec | None = None


@dataclass(frozen=True)
class FeedForward:
    """hidden += down @ (silu(gate @ n) * (up @ n)), n = rms_norm(hidden)."""

    norm: TensorSpec
    gate: TensorSpec
    up: TensorSpec
    down: TensorSpec


@dataclass(frozen=True)
class Expert:
    """down @ (silu(gate @ n) * (up @ n))"""

    gate: TensorSpec
    up: TensorSpec
    down: TensorSpec


@dataclass(frozen=True)
class Mixture:
    """hidden += sum of w_e * expert_e(n) over a token's experts, n = rms_norm(hidden).

    p = softmax(router @ n); the token's experts are the ``config.mixture.per_token`` largest of p, ties to the lower
    index, and w their p, divided by their sum where ``config.mixture.normalized``.
    """

    norm: TensorSpec
    router: TensorSpec
    experts: tuple[Expert, ...]


@dataclass(frozen=True)
class Head:
    """logits = weight @ rms_norm(hidden)"""

    norm: TensorSpec
    weight: TensorSpec


Layer = Embedding | Attention | FeedForward | Mixture | Head
Family = Callable[[ModelConfig], tuple[Layer, ...]]


def tensors_of(layers: tuple[Layer, ...]) -> Iterator[TensorSpec]:
    """Each tensor of the layers once, in the order of use (a tied head shares the embedding's)."""
    seen = set()
    for layer in layers:
        for spec in _specs(layer):
            if spec.name not in seen:
                seen.add(spec.name)
                yield spec


def _specs(layer: Layer | Expert) -> Iterator[TensorSpec]:
    for field in fields(layer):
        value = getattr(layer, field.name)
        if isinstance(value, TensorSpec):
            yield value
        elif isinstance(value, tuple):
            for expert in value:
                yield from _specs(expert)
