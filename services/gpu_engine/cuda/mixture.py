"""Mixture-of-experts layers on the device: routing, grouped products and the weighted sum, with their memory.

What a launch does follows from the work list that routing leaves in device memory (kernels/mixture.cuh), never from the
host: launches depend on the tokens that they are made for alone, and can be captured.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_uint32
from dataclasses import dataclass

import numpy as np

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Kernel, Module, Stream, pointer
from services.gpu_engine.cuda.geometry import BF16_BYTES, Geometry
from services.gpu_engine.cuda.step_arrays import CStep, StepAddresses, StepLimits
from services.gpu_engine.models.config import MixtureConfig, ModelConfig

MIXTURE_SOURCES = ("mixture_route.cu", "mixture_gemm.cu", "mixture_combine.cu")
ROUTE_TOKENS, ROUTE_EXPERTS = 16, 16  # of a block: kRouteTokens, kRouteExperts
GEMM_BLOCK, NORM_BLOCK = 128, 256
ITEM_BYTES = 16
THIN_TOKENS = 8  # a step of so many gives no expert more rows than a thin item has
NARROW_ROWS, MEDIUM_ROWS = 4, 32  # of an expert on average; beyond the latter the tensor cores are the bound
SHAPES = ("thin", "narrow", "medium", "wide")
SHAPE = np.dtype([("out", "<u4"), ("item_rows", "<u4"), ("shared", "<u4")])

WORK = ("logits", "chosen", "weights", "places", "row_token", "items", "item_count", "arrivals")


class CMixtureWork(ctypes.Structure):
    """``blink::MixtureWork``."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in WORK)


class CGemmOperands(ctypes.Structure):
    """``blink::GemmOperands``."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("x", "weight", "out"))


@dataclass(frozen=True)
class GemmShape:
    """One shape of the grouped products: weight rows and item rows of a block, and its kernels."""

    out: int
    item_rows: int
    shared: int
    gate_up: Kernel
    down: Kernel


class MixtureMemory:
    """Device memory of the mixture layers, which run one after the other.

    Attributes:
        work: the work list, by the names of ``WORK``; of the last layer that ran.
        activated: bf16 [rows, expert ffn] between the products, rows grouped by expert.
        results: bf16 [rows, hidden], likewise.
    """

    def __init__(self, config: ModelConfig, limits: StepLimits) -> None:
        mixture = config.mixture
        assert mixture
        rows = limits.tokens * mixture.per_token
        purpose = "activations of mixture layers"
        self.work = {
            "logits": Buffer(4 * limits.tokens * mixture.experts),
            "chosen": Buffer(4 * rows),
            "weights": Buffer(4 * rows),
            "places": Buffer(4 * rows),
            "row_token": Buffer(4 * rows),
            "items": Buffer(ITEM_BYTES * most_items(mixture, limits.tokens, THIN_TOKENS)),
            "item_count": Buffer(4),
            "arrivals": Buffer(4 * (1 + -(-limits.tokens // ROUTE_TOKENS))),
        }
        self.work["arrivals"].fill(0)
        self.activated = Buffer(BF16_BYTES * rows * mixture.ffn, purpose)
        self.results = Buffer(BF16_BYTES * rows * config.hidden, purpose)


def most_items(mixture: MixtureConfig, tokens: int, item_rows: int) -> int:
    """The most items that any routing of so many tokens gives."""
    rows = tokens * mixture.per_token
    return min(mixture.experts, rows) + rows // item_rows


class MixtureKernels:
    """The mixture layers of one model, for steps up to ``limits``. All launches may overlap with the one before.

    Attributes:
        shapes: of the grouped products, by the names of ``SHAPES``; results are the same bits in all of them.
    """

    def __init__(self, geometry: Geometry, compiler: Compiler, step: StepAddresses, limits: StepLimits) -> None:
        assert geometry.config.mixture
        self._mixture, self._hidden = geometry.config.mixture, geometry.config.hidden
        self._step_memory = step.memory  # the launches hold addresses alone
        self._step = CStep.of(step)
        self.memory = MixtureMemory(geometry.config, limits)
        self._work = CMixtureWork(*(self.memory.work[name].pointer for name in WORK))
        modules = [Module(compiler.build((source,), geometry.defines())) for source in MIXTURE_SOURCES]
        self._route = modules[0].kernel("mixture_route", waits=True)
        self._combine = modules[2].kernel("mixture_combine", waits=True)
        self._combine_norm = modules[2].kernel("mixture_combine_norm", waits=True)
        self._eps = c_float(geometry.config.norm_eps)
        self.shapes = {name: _shape(modules[1], name) for name in SHAPES}

    def shape_for(self, tokens: int) -> GemmShape:
        """The shape that suits a step of ``tokens`` tokens; results do not depend on it."""
        rows, experts = tokens * self._mixture.per_token, self._mixture.experts
        if tokens <= THIN_TOKENS:
            return self.shapes["thin"]
        if rows <= NARROW_ROWS * experts:
            return self.shapes["narrow"]
        return self.shapes["medium" if rows <= MEDIUM_ROWS * experts else "wide"]

    def route(self, stream: Stream, tokens: int, *, x: int, router: int, shape: GemmShape) -> None:
        """Choose the experts of each token of x, bf16 [tokens, hidden], and write the work list for ``shape``."""
        grid = (-(-tokens // ROUTE_TOKENS), self._mixture.experts // ROUTE_EXPERTS, 1)
        counts = c_uint32(self._mixture.normalized), c_uint32(shape.item_rows)
        self._route.launch(stream, grid, 256, (self._step, self._work, pointer(x), pointer(router), *counts))

    def gate_up(self, stream: Stream, tokens: int, *, x: int, weight: int, shape: GemmShape) -> None:
        """``memory.activated`` = silu(gate x) * (up x); weight [experts, (gate, up), expert ffn, hidden]."""
        operands = CGemmOperands(x, weight, self.memory.activated.pointer)
        grid = (2 * self._mixture.ffn // shape.out, most_items(self._mixture, tokens, shape.item_rows), 1)
        shape.gate_up.launch(stream, grid, GEMM_BLOCK, (self._work, operands), shape.shared)

    def down(self, stream: Stream, tokens: int, *, weight: int, shape: GemmShape) -> None:
        """``memory.results`` = down activated; weight [experts, hidden, expert ffn]."""
        operands = CGemmOperands(self.memory.activated.pointer, weight, self.memory.results.pointer)
        grid = (self._hidden // shape.out, most_items(self._mixture, tokens, shape.item_rows), 1)
        shape.down.launch(stream, grid, GEMM_BLOCK, (self._work, operands), shape.shared)

    def combine(self, stream: Stream, tokens: int, out: int) -> None:
        """out, bf16 [tokens, hidden] = the weighted sum of each token's ``results``."""
        arguments = (self._step, self._work, pointer(self.memory.results), pointer(out))
        self._combine.launch(stream, (tokens, 1, 1), NORM_BLOCK, arguments)

    def combine_norm(self, stream: Stream, tokens: int, *, residual: int, weight: int, out: int) -> None:
        """residual, float32 [tokens, hidden] += the weighted sum; out, bf16 = its RMSNorm with ``weight``."""
        arguments = (self._step, self._work, pointer(self.memory.results), pointer(residual), pointer(weight))
        self._combine_norm.launch(stream, (tokens, 1, 1), NORM_BLOCK, (*arguments, pointer(out), self._eps))


def _shape(module: Module, name: str) -> GemmShape:
    out, item_rows, shared = module.constant(f"mixture_{name}_shape", SHAPE).item()
    gate_up, down = (module.kernel(f"mixture_{product}_{name}", waits=True) for product in ("gate_up", "down"))
    for kernel in (gate_up, down):
        kernel.allow_shared(shared)
    return GemmShape(out, item_rows, shared, gate_up, down)
