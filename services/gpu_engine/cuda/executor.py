"""Runs one step of a model: its family's layers as kernel launches on a stream.

Launches depend on the sizes they are made for alone, never on the step's content, so the same calls run a step from
the host or are captured once for each bucket of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.cuda.attention_work import AttentionWork
from services.gpu_engine.cuda.bfloat16 import to_bfloat16
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Device, Stream
from services.gpu_engine.cuda.fp8_products import Fp8Products
from services.gpu_engine.cuda.fused_decode import ACTIVATIONS, MOST_ROWS, FusedDecode, FusedMemory, fuses
from services.gpu_engine.cuda.geometry import BF16_BYTES, Geometry
from services.gpu_engine.cuda.kernels import Kernels
from services.gpu_engine.cuda.kv_scales import NO_SCALES, CKvScales
from services.gpu_engine.cuda.mixture import MixtureKernels
from services.gpu_engine.cuda.products import MatrixProducts, WideWays
from services.gpu_engine.cuda.sampler import Sampler
from services.gpu_engine.cuda.skinny_gemm import SkinnyGemm
from services.gpu_engine.cuda.step_arrays import StepAddresses, StepLimits
from services.gpu_engine.cuda.weights import DeviceWeights
from services.gpu_engine.cuda.wide_swiglu import WideSwiglu
from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.family import Attention, Embedding, FeedForward, Head, Layer, Mixture, TensorSpec
from services.gpu_engine.models.rope import rotary_frequencies

Delta = int | MixtureKernels | None
"""What the last layer adds to the residual stream, which the next norm does: an address, or a mixture's results."""


@dataclass(frozen=True)
class Activations:
    """Buffers between kernels, [tokens, width] or [rows, width]; bf16, the residual stream and the logits float32."""

    residual: Buffer
    normed: Buffer
    qkv: Buffer
    attended: Buffer
    delta: Buffer
    gate_up: Buffer
    activated: Buffer
    final: Buffer
    logits: Buffer

    @classmethod
    def allocate(cls, geometry: Geometry, limits: StepLimits) -> Activations:
        config, tokens, rows = geometry.config, limits.tokens, limits.rows
        half, purpose = BF16_BYTES, "activations of the largest step"
        return cls(
            residual=Buffer(4 * tokens * config.hidden, purpose),
            normed=Buffer(half * tokens * config.hidden, purpose),
            qkv=Buffer(half * tokens * geometry.qkv_width, purpose),
            attended=Buffer(half * tokens * config.query_width, purpose),
            delta=Buffer(half * tokens * config.hidden, purpose),
            gate_up=Buffer(half * tokens * 2 * config.ffn, purpose),
            activated=Buffer(half * tokens * config.ffn, purpose),
            final=Buffer(half * rows * config.hidden, purpose),
            logits=Buffer(4 * rows * config.vocabulary, "the logits"),
        )

    def randomize(self) -> None:
        """Fill what matrix products read: they run faster, and at other clocks, on zeros than on numbers."""
        tile = to_bfloat16(np.random.default_rng().standard_normal(1 << 20, np.float32)).view(np.uint8)
        for buffer in (self.normed, self.attended, self.activated, self.final):
            for offset in range(0, buffer.nbytes, tile.nbytes):
                buffer.upload(tile[: buffer.nbytes - offset], offset)


class StepExecutor:
    """A model with its KV cache, ready to run steps.

    Args:
        layers: the family's layers of the model.
        step: where the steps lie, and their results go.
        limits: the largest step.
        pages: of the KV cache.
        kv_scales: of each attention layer's keys and values in an FP8 cache; 1 if not given.
        fp8_scratch: bytes of the largest matrix in FP8 once dequantized; 0 where none is FP8.
        skinny: products may be skinny_gemm.py's and wide_swiglu.py's; without, a row's bits may depend on the bucket.
        fused: steps of few decoding rows may be one kernel, ``launch_decode``.
    """

    def __init__(
        self,
        device: Device,
        geometry: Geometry,
        layers: tuple[Layer, ...],
        weights: DeviceWeights,
        *,
        step: StepAddresses,
        limits: StepLimits,
        pages: int,
        compiler: Compiler,
        kv_scales: Sequence[tuple[float, float]] | None = None,
        skinny: bool = True,
        fused: bool = True,
        fp8_scratch: int = 0,
    ) -> None:
        self.activations = Activations.allocate(geometry, limits)
        self.cache = Buffer(pages * geometry.page_bytes, "the KV cache")
        work = AttentionWork(geometry, limits)
        self.kernels = Kernels(device, geometry, compiler, step, work)
        self.mixture = MixtureKernels(geometry, compiler, step, limits) if geometry.config.mixture else None
        self.sampler = Sampler(geometry.config.vocabulary, compiler, step, limits.rows)
        self.layers = layers
        self._weights = weights
        self._geometry = geometry
        self.pages = pages
        self._layer_bytes = pages * geometry.layer_page_bytes
        layers_scales = [CKvScales(*pair) for pair in kv_scales or ()]
        self._kv_scales = layers_scales or [NO_SCALES] * geometry.config.layers
        self.turns = Buffer.of(rotary_table(geometry.config, limits.pages_per_sequence * geometry.page_size))
        few = SkinnyGemm(device, compiler) if skinny else None
        many = WideWays(WideSwiglu(device, compiler), self.kernels.swiglu, self.activations.gate_up) if skinny else None
        self.products = MatrixProducts(device, few, compiler.cache, many)
        self._fp8: Fp8Products | None = None
        if fp8_scratch:
            scratch = Buffer(fp8_scratch, "the largest FP8 matrix in bf16")
            self._fp8 = Fp8Products(device, compiler, self.products, scratch)
        self._fused: FusedDecode | None = None
        if fused and skinny and fuses(geometry.config, layers, weights):
            buffers = {name: getattr(self.activations, name) for name in ACTIVATIONS}
            memory = FusedMemory(buffers, self.turns.pointer, self.layer_pages, self._kv_scales)
            self._fused = FusedDecode(device, geometry, layers, weights, compiler, step=step, work=work, memory=memory)

    @property
    def vocabulary(self) -> int:
        return self._geometry.config.vocabulary

    def layer_pages(self, layer: int) -> int:
        """Address of a layer's part of the KV cache."""
        return self.cache.pointer + layer * self._layer_bytes

    @property
    def fused_rows(self) -> int:
        """Rows of the largest step that ``launch_decode`` can run."""
        return MOST_ROWS if self._fused else 0

    def launch_decode(self, stream: Stream, rows: int) -> None:
        """Launch a step of at most ``rows`` rows, each of one token and sampled at most once, in one kernel.

        Bit for bit what ``launch`` makes of it.
        """
        assert self._fused
        self._fused.launch(stream, rows)
        self.sampler.sample(stream, rows, self.activations.logits.pointer)

    def launch(self, stream: Stream, tokens: int, samples: int, layers: Sequence[Layer] | None = None) -> None:
        """Launch a step of at most ``tokens`` tokens and ``samples`` sampled rows; its counts say what is there.

        Args:
            layers: some of the model's instead of all, for measurements.
        """
        self.kernels.plan_attention(stream)
        # Of a mixture's many short kernels each hides what it loads first; a dense step gains nothing (decision 0011).
        with stream.overlapping() if self.mixture else nullcontext():
            self._launch_layers(stream, self.layers if layers is None else layers, tokens, samples)

    def _launch_layers(self, stream: Stream, layers: Sequence[Layer], tokens: int, samples: int) -> None:
        delta: Delta = None
        for layer in layers:
            match layer:
                case Embedding():
                    table = self._weights.address(layer.weight)
                    self.kernels.embedding(stream, tokens, table, self.activations.residual.pointer)
                case Attention():
                    delta = self._attention(stream, layer, tokens, delta)
                case FeedForward():
                    delta = self._feed_forward(stream, layer, tokens, delta)
                case Mixture():
                    delta = self._mixture(stream, layer, tokens, delta)
                case Head():
                    self._head(stream, layer, tokens, samples, delta)

    def _attention(self, stream: Stream, layer: Attention, tokens: int, delta: Delta) -> int:
        config, buffers = self._geometry.config, self.activations
        qkv, attended, out = buffers.qkv.pointer, buffers.attended.pointer, buffers.delta.pointer
        normed, query, width = self._norm(stream, tokens, layer.norm, delta), layer.query, self._geometry.qkv_width
        self._matmul(stream, normed, query, qkv, m=tokens, n=width, k=config.hidden)
        self.rotary(stream, layer, tokens)
        pages = self.layer_pages(layer.index)
        self.kernels.attention(
            stream,
            layer.index,
            qkv=qkv,
            tokens=tokens,
            layer_pages=pages,
            pages=self.pages,
            out=attended,
            scales=self._kv_scales[layer.index],
        )
        self._matmul(stream, attended, layer.output, out, m=tokens, n=config.hidden, k=config.query_width)
        return out

    def _matmul(self, stream: Stream, x: int, weight: TensorSpec, out: int, *, m: int, n: int, k: int) -> None:
        """The product with the stack that begins with ``weight``, in bf16 or in FP8."""
        if matrix := self._weights.fp8(weight):
            assert self._fp8
            self._fp8.matmul(stream, x, matrix, out, m=m, n=n, k=k)
        else:
            self.products.matmul(stream, x, self._weights.address(weight), out, m=m, n=n, k=k)

    def _fused_swiglu(self, stream: Stream, x: int, gate: TensorSpec, out: int, *, m: int, n: int, k: int) -> bool:
        """``swiglu`` of the gate and up that begin with ``gate``, if it can be used for so many tokens."""
        if matrix := self._weights.fp8(gate):
            assert self._fp8
            if not self._fp8.fuses_swiglu(m):
                return False
            self._fp8.swiglu(stream, x, matrix, out, m=m, n=n, k=k)
            return True
        if not self.products.fuses_swiglu(m):
            return False
        self.products.swiglu(stream, x, self._weights.address(gate), out, m=m, n=n, k=k)
        return True

    def rotary(self, stream: Stream, layer: Attention, tokens: int) -> None:
        """Launch the norms of heads, the rotation and the write of keys and values."""
        norms = (layer.query_norm, layer.key_norm)
        query_norm, key_norm = (self._weights.address(norm) if norm else 0 for norm in norms)
        qkv, pages = self.activations.qkv.pointer, self.layer_pages(layer.index)
        self.kernels.rotary(
            stream,
            tokens,
            qkv,
            pages,
            self.turns.pointer,
            norms=(query_norm, key_norm),
            scales=self._kv_scales[layer.index],
        )

    def _feed_forward(self, stream: Stream, layer: FeedForward, tokens: int, delta: Delta) -> int:
        config, buffers = self._geometry.config, self.activations
        gate_up, activated, out = buffers.gate_up.pointer, buffers.activated.pointer, buffers.delta.pointer
        normed = self._norm(stream, tokens, layer.norm, delta)
        if not self._fused_swiglu(stream, normed, layer.gate, activated, m=tokens, n=config.ffn, k=config.hidden):
            self._matmul(stream, normed, layer.gate, gate_up, m=tokens, n=2 * config.ffn, k=config.hidden)
            self.kernels.swiglu(stream, tokens, gate_up, activated)
        self._matmul(stream, activated, layer.down, out, m=tokens, n=config.hidden, k=config.ffn)
        return out

    def _mixture(self, stream: Stream, layer: Mixture, tokens: int, delta: Delta) -> MixtureKernels:
        kernels = self.mixture
        assert kernels
        normed, router = self._norm(stream, tokens, layer.norm, delta), self._weights.address(layer.router)
        gate, down = (self._weights.address(spec) for spec in (layer.experts[0].gate, layer.experts[0].down))
        shape = kernels.shape_for(tokens)
        kernels.route(stream, tokens, x=normed, router=router, shape=shape)
        kernels.gate_up(stream, tokens, x=normed, weight=gate, shape=shape)
        kernels.down(stream, tokens, weight=down, shape=shape)
        return kernels

    def _head(self, stream: Stream, layer: Head, tokens: int, samples: int, delta: Delta) -> None:
        buffers = self.activations
        if isinstance(delta, MixtureKernels):
            delta.combine(stream, tokens, buffers.delta.pointer)
        self.kernels.final_norm(
            stream,
            samples,
            residual=buffers.residual.pointer,
            delta=buffers.delta.pointer,
            weight=self._weights.address(layer.norm),
            out=buffers.final.pointer,
        )
        self.logits(stream, layer, samples)
        self.sampler.sample(stream, samples, buffers.logits.pointer)

    def logits(self, stream: Stream, layer: Head, samples: int) -> None:
        """Launch the product of the normed rows and the head."""
        final, logits = self.activations.final.pointer, self.activations.logits.pointer
        weight, config = self._weights.address(layer.weight), self._geometry.config
        self.products.matmul(
            stream, final, weight, logits, m=samples, n=config.vocabulary, k=config.hidden, fp32_out=True
        )

    def _norm(self, stream: Stream, tokens: int, norm: TensorSpec, delta: Delta) -> int:
        buffers, weight = self.activations, self._weights.address(norm)
        residual, normed = buffers.residual.pointer, buffers.normed.pointer
        if isinstance(delta, MixtureKernels):
            delta.combine_norm(stream, tokens, residual=residual, weight=weight, out=normed)
        else:
            self.kernels.rms_norm(stream, tokens, residual=residual, delta=delta, weight=weight, out=normed)
        return normed


def rotary_table(config: ModelConfig, positions: int) -> NDArray[np.float32]:
    """(cos, sin) of each position's angles, float32 [positions, rotary_dim / 2, 2], computed in float64."""
    frequencies, factor = rotary_frequencies(config, positions)
    angles = np.arange(positions)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32) * np.float32(factor)
