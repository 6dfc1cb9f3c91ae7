"""Random ragged steps, and a bench that holds one geometry's kernels with poisoned buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.cuda.attention_work import DIVIDED_TILES, AttentionWork
from services.gpu_engine.cuda.bfloat16 import from_bfloat16, to_bfloat16
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Device
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.kernels import Kernels
from services.gpu_engine.cuda.kv_scales import NO_SCALES, CKvScales
from services.gpu_engine.cuda.step_arrays import ROW_SAMPLING, HostStep, StepArrays, StepLimits
from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.float8 import VALUES, to_e4m3

Floats = NDArray[np.float64]
Rows = Sequence[tuple[int, int]]
"""(tokens already in the KV cache, tokens of this step) of each row."""

POISON = 0xFF  # NaN in e4m3, bf16, IEEE half and float32
KV_SCALES = CKvScales(0.37, 1.7)  # of FP8 caches in tests


def config(**changes: Any) -> ModelConfig:
    """A small Llama with some numbers changed."""
    values: dict[str, Any] = {
        "architecture": "llama",
        "layers": 2,
        "hidden": 256,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "ffn": 320,
        "vocabulary": 512,
        "context": 4096,
        "norm_eps": 1e-5,
        "rope_base": 10000.0,
        "rope_scaling": None,
        "tied_embeddings": False,
        "eos_ids": (0,),
    }
    return ModelConfig(**(values | changes))


def sampling_rows(count: int, **values: Any) -> NDArray[np.void]:
    """RowSampling with neutral values, changed by ``values`` (scalars or one for each row)."""
    sampling = np.zeros(count, ROW_SAMPLING)
    neutral = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "history_length": 1}
    for name, value in (neutral | values).items():
        sampling[name] = value
    return sampling


def as_array(values: Any) -> NDArray[np.int32]:
    return np.asarray(values, np.int32)


def ragged_step(
    rng: np.random.Generator, rows: Rows, *, vocabulary: int, page_size: int, pages: int, lines: int, width: int
) -> HostStep:
    """A step of these rows with random tokens, lines and pages; every row is sampled."""
    tokens = sum(count for _, count in rows)
    lengths = [computed + count for computed, count in rows]
    free = rng.permutation(pages)
    table = np.full((lines, width), -1, np.int32)
    sequence = rng.permutation(lines)[: len(rows)]
    for line, length in zip(sequence, lengths, strict=True):
        count = -(-length // page_size)
        table[line, :count], free = free[:count], free[count:]
    return HostStep(
        token_ids=as_array(rng.integers(0, vocabulary, tokens)),
        positions=as_array(np.concatenate([np.arange(done, done + count) for done, count in rows])),
        row_start=as_array(np.cumsum([0, *(count for _, count in rows)])),
        kv_length=as_array(lengths),
        sequence=as_array(sequence),
        page_table=table,
        sample_row=as_array(np.arange(len(rows))),
        sampling=sampling_rows(len(rows), temperature=0.0),
        history=np.zeros(1, np.uint32),
    )


class KernelBench:
    """One geometry's kernels over a step of given rows.

    Attributes:
        scales: of the KV cache.
    """

    def __init__(
        self, device: Device, compiler: Compiler, rng: np.random.Generator, rows: Rows, **changes: Any
    ) -> None:
        page_size, kv_cache = changes.pop("page_size", 16), changes.pop("kv_cache", "bf16")
        division = {name: changes.pop(name) for name in ("segment_keys", "divided_tiles") if name in changes}
        self.rng, self.rows = rng, rows
        self.config = config(**changes)
        self.geometry = Geometry(self.config, page_size, kv_cache)
        self.scales = KV_SCALES if kv_cache == "fp8" else NO_SCALES
        self.tokens = sum(count for _, count in rows)
        width = -(-max(sum(row) for row in rows) // page_size) + 1
        self.pages = sum(-(-sum(row) // page_size) for row in rows) + 3
        lines = len(rows) + 2
        self.limits = StepLimits(self.tokens + 5, lines, width)
        self.arrays = StepArrays(self.limits)
        self._device, self._compiler = device, compiler
        self.divide(**division)
        self.step = ragged_step(
            rng,
            rows,
            vocabulary=self.config.vocabulary,
            page_size=page_size,
            pages=self.pages,
            lines=lines,
            width=width,
        )
        self.arrays.upload(self.step)

    def divide(self, segment_keys: int | None = None, divided_tiles: int = DIVIDED_TILES) -> None:
        """Begin again with attention divided so (AttentionWork)."""
        work = self.work = AttentionWork(
            self.geometry, self.limits, segment_keys=segment_keys, divided_tiles=divided_tiles
        )
        partial = work.partial_out, work.partial_ml, work.segment_out, work.segment_ml
        for buffer in (work.token_row, work.tiles, work.splits, *partial):
            buffer.fill(POISON)
        self.kernels = Kernels(self._device, self.geometry, self._compiler, self.arrays.addresses, work)

    def random(self, *shape: int, scale: float = 1.0) -> tuple[Buffer, Floats]:
        """A bf16 buffer of normal values, and the values that it holds."""
        bits = to_bfloat16((self.rng.standard_normal(shape) * scale).astype(np.float32))
        return Buffer.of(bits), from_bfloat16(bits).astype(np.float64)

    def random_projection(self, scale: float = 1.0) -> tuple[Buffer, Floats]:
        """What the rotary kernel leaves of the fused projection, and its queries, [tokens, heads, head_dim]."""
        model, shape = self.config, (self.tokens, self.geometry.qkv_width)
        if self.geometry.kv_cache == "fp8":
            halves = (self.rng.standard_normal(shape) * scale).astype(np.float16)
            buffer, held = Buffer.of(halves.view(np.uint16)), halves.astype(np.float64)
        else:
            buffer, held = self.random(*shape, scale=scale)
        return buffer, held[:, : model.query_width].reshape(self.tokens, model.heads, model.head_dim)

    def random_cache(self) -> tuple[Buffer, Floats]:
        """One layer's pages: random where a row's earlier or present tokens lie, poison elsewhere.

        Returns:
            The buffer, and float64 [pages, 2, kv_heads, page_size, head_dim].
        """
        model, size = self.config, self.geometry.page_size
        shape = (self.pages, 2, model.kv_heads, size, model.head_dim)
        values = self.rng.standard_normal(shape).astype(np.float32)
        used = np.zeros((self.pages, size), bool)
        for row, (computed, count) in enumerate(self.rows):
            positions = np.arange(computed + count)
            line = self.step.page_table[self.step.sequence[row]]
            used[line[positions // size], positions % size] = True
        values[np.broadcast_to(~used[:, None, None, :, None], shape)] = np.nan
        if self.geometry.kv_cache == "fp8":
            scales = np.array([self.scales.key, self.scales.value], np.float32).reshape(2, 1, 1, 1)
            codes = to_e4m3(values / scales)
            return Buffer.of(codes), VALUES[codes].astype(np.float64) * scales
        bits = to_bfloat16(values)
        return Buffer.of(bits), from_bfloat16(bits).astype(np.float64)


def poisoned(nbytes: int) -> Buffer:
    buffer = Buffer(nbytes)
    buffer.fill(POISON)
    return buffer


def bfloat16_of(buffer: Buffer, *shape: int) -> Floats:
    return from_bfloat16(buffer.download(np.uint16, shape)).astype(np.float64)


def relative_error(found: Any, expected: Any) -> float:
    """||found - expected|| / ||expected||; NaN when anything is NaN."""
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))
