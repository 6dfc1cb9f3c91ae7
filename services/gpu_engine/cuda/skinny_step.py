"""A dense model's layers for a step of few tokens: six kernels a layer, no norm among them.

A product whose result joins the residual stream adds it there and leaves the sum times the next norm's weight, with its
sums of squares; the product behind finds the norm's factor from those. Of a layer remain QKV, rotary, attention,
output, gate-up with SwiGLU, and down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from services.gpu_engine.cuda.driver import Buffer, Stream
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.skinny_gemm import Norm, Overlap, SkinnyGemm
from services.gpu_engine.cuda.weights import DeviceWeights
from services.gpu_engine.models.family import Attention, Embedding, FeedForward, Head, Layer, TensorSpec

if TYPE_CHECKING:
    from services.gpu_engine.cuda.executor import Activations

Attend = Callable[[Stream, Attention, int], None]
"""Launches what turns ``activations.qkv`` into ``activations.attended``, for so many tokens."""

BEHIND_ATTENTION = Overlap(prefetched=16)
"""Decode attention of few rows leaves the memory idle: 256 KiB a block, most of an output product's weights."""


def is_dense(layers: tuple[Layer, ...]) -> bool:
    """Embedding, attention and feed-forward in turn, head: what SkinnyStep runs."""
    middle = layers[1:-1]
    pairs = zip(middle[::2], middle[1::2], strict=False)
    return (
        isinstance(layers[0], Embedding)
        and isinstance(layers[-1], Head)
        and len(middle) % 2 == 0
        and all(isinstance(first, Attention) and isinstance(second, FeedForward) for first, second in pairs)
    )


@dataclass(frozen=True)
class SkinnyStep:
    """Launches the layers of a dense model between the first norm and the head's.

    Attributes:
        layers: all of the model's.
        squares: of the residual stream's rows, ``square_bytes(hidden)``.
    """

    layers: tuple[Layer, ...]
    geometry: Geometry
    weights: DeviceWeights
    activations: Activations
    gemm: SkinnyGemm
    squares: Buffer

    def launch(self, stream: Stream, tokens: int, attend: Attend) -> None:
        """From ``activations.normed``, the first norm's rows, to ``activations.delta``, which the head's norm adds.

        Args:
            attend: the rest of an attention layer, between its two products.
        """
        norm: Norm | None = None
        for layer, following in pairwise(self.layers):
            match layer, following:
                case Attention(), FeedForward():
                    self._qkv(stream, layer, tokens, norm)
                    attend(stream, layer, tokens)
                    x = self.activations.attended
                    norm = self._add(stream, x, layer.output, following.norm, tokens=tokens, overlap=BEHIND_ATTENTION)
                case FeedForward(), Attention():
                    self._gate_up(stream, layer, tokens, norm)
                    norm = self._add(stream, self.activations.activated, layer.down, following.norm, tokens=tokens)
                case FeedForward(), Head():
                    self._gate_up(stream, layer, tokens, norm)
                    self._last(stream, layer, tokens)

    def _qkv(self, stream: Stream, layer: Attention, tokens: int, norm: Norm | None) -> None:
        x, out, config = self.activations.normed.pointer, self.activations.qkv.pointer, self.geometry.config
        query, width = self.weights.address(layer.query), self.geometry.qkv_width
        self.gemm.matmul(stream, x, query, out, m=tokens, n=width, k=config.hidden, norm=norm)

    def _gate_up(self, stream: Stream, layer: FeedForward, tokens: int, norm: Norm | None) -> None:
        x, out, config = self.activations.normed.pointer, self.activations.activated.pointer, self.geometry.config
        gate = self.weights.address(layer.gate)
        self.gemm.swiglu(stream, x, gate, out, m=tokens, n=config.ffn, k=config.hidden, norm=norm)

    def _last(self, stream: Stream, layer: FeedForward, tokens: int) -> None:
        x, out, config = self.activations.activated.pointer, self.activations.delta.pointer, self.geometry.config
        down = self.weights.address(layer.down)
        self.gemm.matmul(stream, x, down, out, m=tokens, n=config.hidden, k=config.ffn)

    def _add(
        self,
        stream: Stream,
        x: Buffer,
        weight: TensorSpec,
        next_norm: TensorSpec,
        *,
        tokens: int,
        overlap: Overlap | None = None,
    ) -> Norm:
        hidden, depth = weight.shape
        self.gemm.add(
            stream,
            x.pointer,
            self.weights.address(weight),
            self.activations.residual.pointer,
            m=tokens,
            n=hidden,
            k=depth,
            norm_weight=self.weights.address(next_norm),
            out=self.activations.normed.pointer,
            squares=self.squares.pointer,
            overlap=overlap or Overlap(),
        )
        return Norm(self.squares.pointer, hidden, self.geometry.config.norm_eps)
