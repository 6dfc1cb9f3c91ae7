"""A whole step of few decoding rows as one launch: kernels/fused_decode.cu, for dense models in bf16.

Its bits are those of a step of separate kernels whose products are skinny_gemm.py's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from services.gpu_engine.cuda.attention_work import AttentionWork
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Device, Kernel, Module, Stream, pointer
from services.gpu_engine.cuda.fused_plan import CProduct, ProductPlan, product_plans
from services.gpu_engine.cuda.geometry import BF16_BYTES, Geometry
from services.gpu_engine.cuda.kv_scales import CKvScales
from services.gpu_engine.cuda.skinny_schedule import DEPTH
from services.gpu_engine.cuda.step_arrays import CStep, StepAddresses
from services.gpu_engine.cuda.tensor_map import CTensorMap, tensor_map
from services.gpu_engine.cuda.weights import DeviceWeights
from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.family import Attention, Embedding, FeedForward, Head, Layer, TensorSpec

SOURCE = "fused_decode.cu"
WIDTHS = (8, 16, 32)
"""Rows that a build of the kernel holds."""
MOST_ROWS = WIDTHS[-1]
THREADS = 384
ADDRESSES = ("layers", "last_norm", "turns", "progress", "launch", "fused", "delta")
ACTIVATIONS = ("residual", "normed", "attended", "activated", "final", "logits")


class CFusedLayer(ctypes.Structure):
    """``blink::FusedLayer``."""

    _fields_ = (
        ("weights", CTensorMap * 4),
        *((name, ctypes.c_uint64) for name in ("attention_norm", "feed_norm", "query_norm", "key_norm", "pages")),
        ("scales", CKvScales),
        ("unused", ctypes.c_uint64 * 2),  # to a multiple of the maps' alignment
    )


class CFusedModel(ctypes.Structure):
    """``blink::FusedModel``."""

    _fields_ = (
        ("inputs", CTensorMap * 5),
        ("head", CTensorMap),
        ("products", CProduct * 5),
        *((name, ctypes.c_uint64) for name in (*ADDRESSES, *ACTIVATIONS)),
        ("layer_count", ctypes.c_uint32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_uint32 * 5),  # to a multiple of the maps' alignment
    )


@dataclass(frozen=True)
class FusedMemory:
    """What the step works on.

    Attributes:
        activations: each of ACTIVATIONS; they need not have rows for the widest step.
        turns: address of the rotary table.
        layer_pages: address of a layer's part of the KV cache.
        kv_scales: of each attention layer's.
    """

    activations: dict[str, Buffer]
    turns: int
    layer_pages: Callable[[int], int]
    kv_scales: Sequence[CKvScales]


def fuses(config: ModelConfig, layers: Iterable[Layer], weights: DeviceWeights) -> bool:
    """Whether the kernel can run these: dense layers, all in bf16, whose widths are whole stages."""
    if any(width % DEPTH for width in (config.hidden, config.query_width, config.ffn)):
        return False
    for layer in layers:
        match layer:
            case Attention():
                stacks = layer.query, layer.output
            case FeedForward():
                stacks = layer.gate, layer.down
            case Embedding() | Head():
                continue
            case _:
                return False
        if any(weights.fp8(first) for first in stacks):
            return False
    return True


class FusedDecode:
    """The kernel with a model's weights, one build for each of WIDTHS.

    Args:
        step: where the steps lie.
        work: attention's; its partial results are used.
    """

    def __init__(
        self,
        device: Device,
        geometry: Geometry,
        layers: tuple[Layer, ...],
        weights: DeviceWeights,
        compiler: Compiler,
        *,
        step: StepAddresses,
        work: AttentionWork,
        memory: FusedMemory,
    ) -> None:
        self._blocks = device.multiprocessors - 1  # the control loop has one
        self._geometry = geometry
        self._held = step.memory, work  # launches hold addresses alone
        self._step, self._work = CStep.of(step), work.as_argument()
        self._memory = memory
        attentions = [layer for layer in layers if isinstance(layer, Attention)]
        self._counters = 2 * (4 * len(attentions) + 1)
        self._progress = Buffer.of(np.zeros(self._counters + 1, np.uint32))  # and the launch's number
        self._fused = Buffer(8 * MOST_ROWS * geometry.qkv_width // 2)  # 8 bytes for each pair and its mark
        self._delta = Buffer(8 * MOST_ROWS * geometry.config.hidden // 2)
        self._fused.fill(0)  # nobody's mark
        self._delta.fill(0)
        (self._embedding,) = (weights.address(layer.weight) for layer in layers if isinstance(layer, Embedding))
        (self._head,) = (layer for layer in layers if isinstance(layer, Head))
        self._weights = weights
        self._plans = product_plans(geometry.config, self._blocks)
        feeds = [layer for layer in layers if isinstance(layer, FeedForward)]
        made = [self._layer(attention, feed) for attention, feed in zip(attentions, feeds, strict=True)]
        self._layers = Buffer.of(np.frombuffer(b"".join(bytes(layer) for layer in made), np.uint8))
        self._layer_count = len(made)
        self._begin: dict[int, Kernel] = {}
        self._decode: dict[int, Kernel] = {}
        self._models: dict[int, CFusedModel] = {}
        self._shared: dict[int, int] = {}
        for width in WIDTHS:
            module = Module(compiler.build((SOURCE,), geometry.defines() | {"BLINK_SKINNY_TOKENS": width}))
            self._begin[width], self._decode[width] = module.kernel("fused_begin"), module.kernel("fused_decode")
            self._shared[width] = int(module.constant("fused_shared_bytes"))
            sizes = {"fused_layer_bytes": CFusedLayer, "fused_model_bytes": CFusedModel}
            assert all(int(module.constant(name)) == ctypes.sizeof(kind) for name, kind in sizes.items())
            self._decode[width].allow_shared(self._shared[width])
            self._models[width] = self._model(width)

    def launch(self, stream: Stream, rows: int) -> None:
        """Launch a step of at most ``rows`` rows of one token each, up to the logits of its samples.

        Raises:
            ValueError: more than MOST_ROWS rows.
            DriverError: the launch failed.
        """
        width = next((width for width in WIDTHS if rows <= width), None)
        if width is None:
            raise ValueError(f"a fused step of {rows} rows, must be at most {MOST_ROWS}")
        residual = pointer(self._memory.activations["residual"])
        beginning = self._step, pointer(self._embedding), residual, pointer(self._progress)
        numbers = ctypes.c_uint32(self._counters), pointer(self._launch_number)
        self._begin[width].launch(stream, (rows, 1, 1), 128, (*beginning, *numbers))
        rest = (self._step, self._work, self._models[width])
        self._decode[width].launch(stream, (self._blocks, 1, 1), THREADS, rest, self._shared[width])

    @property
    def _launch_number(self) -> int:
        return self._progress.pointer + 4 * self._counters

    def _layer(self, attention: Attention, feed: FeedForward) -> CFusedLayer:
        config, weights = self._geometry.config, self._weights
        qkv, output, gate_up, down, _ = self._plans

        def plain(first: TensorSpec, plan: ProductPlan, depth: int) -> CTensorMap:
            return _stage_map(weights.address(first), plan.outputs, depth, (plan.rows, plan.boxes))

        row = BF16_BYTES * config.hidden
        gated = tensor_map(
            weights.address(feed.gate),
            shape=(DEPTH, 8, 2, config.ffn // 8, config.hidden // DEPTH),  # rows of eight, the gate's and up's in turn
            strides=(row, config.ffn * row, 8 * row, BF16_BYTES * DEPTH),
            box=(DEPTH, 8, 2, gate_up.rows // 16, gate_up.boxes),
        )
        maps = (
            plain(attention.query, qkv, config.hidden),
            plain(attention.output, output, config.query_width),
            gated,
            plain(feed.down, down, config.ffn),
        )
        norms = (attention.norm, feed.norm, attention.query_norm, attention.key_norm)
        addresses = (weights.address(norm) if norm else 0 for norm in norms)
        pages, scales = self._memory.layer_pages(attention.index), self._memory.kv_scales[attention.index]
        return CFusedLayer((CTensorMap * 4)(*maps), *addresses, pages, scales)

    def _model(self, width: int) -> CFusedModel:
        config, memory = self._geometry.config, self._memory
        buffers = memory.activations
        inputs = (
            (buffers["normed"], config.hidden),
            (buffers["attended"], config.query_width),
            (buffers["normed"], config.hidden),
            (buffers["activated"], config.ffn),
            (buffers["final"], config.hidden),
        )
        head = self._plans[-1]
        return CFusedModel(
            inputs=(CTensorMap * 5)(
                *(
                    _stage_map(buffer.pointer, _held_rows(buffer, depth), depth, (width, plan.boxes))
                    for (buffer, depth), plan in zip(inputs, self._plans, strict=True)
                )
            ),
            head=_stage_map(
                self._weights.address(self._head.weight), head.outputs, config.hidden, (head.rows, head.boxes)
            ),
            products=(CProduct * 5)(*(plan.as_argument() for plan in self._plans)),
            layers=self._layers.pointer,
            last_norm=self._weights.address(self._head.norm),
            turns=memory.turns,
            progress=self._progress.pointer,
            launch=self._launch_number,
            fused=self._fused.pointer,
            delta=self._delta.pointer,
            **{name: buffer.pointer for name, buffer in buffers.items()},
            layer_count=self._layer_count,
            eps=config.norm_eps,
            scale=self._geometry.score_scale,
        )


def _held_rows(buffer: Buffer, columns: int) -> int:
    """Rows of so many bf16 columns that the buffer has: what a copy of more rows may read."""
    return buffer.nbytes // (BF16_BYTES * columns)


def _stage_map(address: int, rows: int, columns: int, stage: tuple[int, int]) -> CTensorMap:
    """Of a row-major matrix of which a stage has so many rows of so many times DEPTH columns."""
    strides = BF16_BYTES * columns, BF16_BYTES * DEPTH
    return tensor_map(address, shape=(DEPTH, rows, columns // DEPTH), strides=strides, box=(DEPTH, *stage))
