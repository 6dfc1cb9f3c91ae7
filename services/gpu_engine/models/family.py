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
    """

    name: str
    shape: tuple[int, ...]
    gguf: str
    hugging_face: str
    rotary_heads: int = 0


@dataclass(frozen=True)
class Embedding:
    """hidden = weight[token]"""

    weight: TensorSpec


@dataclass(frozen=True)
class Attention:
    """hidden += output @ attend(rope(query @ n), rope(key @ n), value @ n), n = rms_norm(hidden); grouped queries."""

    index: int
    norm: TensorSpec
    query: TensorSpec
    key: TensorSpec
    value: TensorSpec
    output: TensorSpec


@dataclass(frozen=True)
class FeedForward:
    """hidden += down @ (silu(gate @ n) * (up @ n)), n = rms_norm(hidden)."""

    norm: TensorSpec
    gate: TensorSpec
    up: TensorSpec
    down: TensorSpec


@dataclass(frozen=True)
class Head:
    """logits = weight @ rms_norm(hidden)"""

    norm: TensorSpec
    weight: TensorSpec


Layer = Embedding | Attention | FeedForward | Head
Family = Callable[[ModelConfig], tuple[Layer, ...]]


def tensors_of(layers: tuple[Layer, ...]) -> Iterator[TensorSpec]:
    """Each tensor of the layers once, in the order of use (a tied head shares the embedding's)."""
    seen = set()
    for layer in layers:
        for field in fields(layer):
            spec = getattr(layer, field.name)
            if isinstance(spec, TensorSpec) and spec.name not in seen:
                seen.add(spec.name)
                yield spec
