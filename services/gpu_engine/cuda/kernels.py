"""The kernels of one geometry, as launches with named arguments. Each kernel's source says what it computes."""

from __future__ import annotations

from ctypes import c_float, c_uint32

from services.gpu_engine.cuda.attention_maps import page_map, query_map
from services.gpu_engine.cuda.attention_work import MOST_BLOCKS, AttentionWork
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Device, Module, Stream, pointer
from services.gpu_engine.cuda.errors import CudaUnavailableError
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.kv_scales import NO_SCALES, CKvScales
from services.gpu_engine.cuda.step_arrays import CStep, StepAddresses

SOURCES = (
    "attention.cu",
    "embedding.cu",
    "plan_attention.cu",
    "rms_norm.cu",
    "rotary.cu",
    "swiglu.cu",
)
ATTENTION_BLOCK = 384
SWIGLU_BLOCK = 256


class Kernels:
    """Loads the kernels; the arrays that all of them read are bound once.

    Addresses are of device memory. ``tokens`` and ``samples`` are what a launch is made for; the step's own counts,
    in device memory, say how many are there.
    """

    def __init__(
        self, device: Device, geometry: Geometry, compiler: Compiler, step: StepAddresses, work: AttentionWork
    ) -> None:
        if device.arch != "sm_90a":
            raise CudaUnavailableError(f"{device.name} is {device.arch}: attention needs a Hopper GPU (sm_90a)")
        modules = {source: Module(compiler.build((source,), geometry.defines())) for source in SOURCES}
        self._geometry = geometry
        self._memory = step.memory, work  # the launches hold addresses alone
        self._step, self._work = CStep.of(step, work.token_row.pointer), work.as_argument()
        self._token_row = pointer(work.token_row)
        self._embedding = modules["embedding.cu"].kernel("embedding", waits=True)
        self._plan = modules["plan_attention.cu"].kernel("plan_attention")  # a step's first: nothing to overlap with
        self._rms_norm = modules["rms_norm.cu"].kernel("rms_norm", waits=True)
        self._add_rms_norm = modules["rms_norm.cu"].kernel("add_rms_norm", waits=True)
        self._final_norm = modules["rms_norm.cu"].kernel("final_norm", waits=True)
        self._rotary = modules["rotary.cu"].kernel("rotary", waits=True)
        self._attention = modules["attention.cu"].kernel("attention", waits=True)
        self._swiglu = modules["swiglu.cu"].kernel("swiglu", waits=True)
        self._shared = int(modules["attention.cu"].constant("attention_shared_bytes"))
        self._attention.allow_shared(self._shared)
        self._attention_grid = min(MOST_BLOCKS, max(1, device.multiprocessors - 1))  # one has the control loop

    def embedding(self, stream: Stream, tokens: int, table: int, residual: int) -> None:
        self._embedding.launch(stream, (tokens, 1, 1), 128, (self._step, pointer(table), pointer(residual)))

    def plan_attention(self, stream: Stream) -> None:
        layers = c_uint32(self._geometry.config.layers)
        self._plan.launch(stream, (1, 1, 1), 512, (self._step, self._work, self._token_row, layers))

    def rms_norm(self, stream: Stream, tokens: int, *, residual: int, delta: int | None, weight: int, out: int) -> None:
        """With ``delta``, residual += delta comes first."""
        tail = (pointer(weight), pointer(out), c_float(self._geometry.config.norm_eps))
        if delta is None:
            self._rms_norm.launch(stream, (tokens, 1, 1), 256, (self._step, pointer(residual), *tail))
        else:
            head = (self._step, pointer(residual), pointer(delta))
            self._add_rms_norm.launch(stream, (tokens, 1, 1), 256, (*head, *tail))

    def final_norm(self, stream: Stream, samples: int, *, residual: int, delta: int, weight: int, out: int) -> None:
        arguments = (self._step, pointer(residual), pointer(delta), pointer(weight), pointer(out))
        eps = c_float(self._geometry.config.norm_eps)
        self._final_norm.launch(stream, (samples, 1, 1), 256, (*arguments, eps))

    def rotary(
        self,
        stream: Stream,
        tokens: int,
        qkv: int,
        layer_pages: int,
        table: int,
        *,
        norms: tuple[int, int] = (0, 0),
        scales: CKvScales = NO_SCALES,
    ) -> None:
        """``norms`` are the weights of each head's query and key norm, 0 and 0 where the model has none.

        Queries stay in ``qkv``, as ``attention`` reads them: IEEE halves if the KV cache is FP8.
        """
        query_norm, key_norm = norms
        arguments = (self._step, pointer(qkv), pointer(layer_pages), pointer(table))
        tail = (pointer(query_norm), pointer(key_norm), c_float(self._geometry.config.norm_eps), scales)
        self._rotary.launch(stream, (tokens, 1, 1), 256, (*arguments, *tail))

    def attention(
        self,
        stream: Stream,
        layer: int,
        *,
        qkv: int,
        tokens: int,
        layer_pages: int,
        pages: int,
        out: int,
        scales: CKvScales = NO_SCALES,
    ) -> None:
        """``pages`` is how many a layer has."""
        scale = c_float(self._geometry.score_scale)
        maps = query_map(self._geometry, qkv, tokens), page_map(self._geometry, layer_pages, pages)
        arguments = (self._step, self._work, c_uint32(layer), *maps, pointer(qkv), pointer(layer_pages), pointer(out))
        grid = (self._attention_grid, 1, 1)
        self._attention.launch(stream, grid, ATTENTION_BLOCK, (*arguments, scale, scales), self._shared)

    def swiglu(self, stream: Stream, tokens: int, gate_up: int, out: int) -> None:
        """Of all ``tokens``, whatever the step's count."""
        chunks = -(-self._geometry.config.ffn // (8 * SWIGLU_BLOCK))
        arguments = (c_uint32(tokens), pointer(gate_up), pointer(out))
        self._swiglu.launch(stream, (chunks, tokens, 1), SWIGLU_BLOCK, arguments)
