"""The fused decode step against the step of separate kernels, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")
from bench.families import RandomWeights
from services.gpu_engine.cuda import fused_decode
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Device, Stream
from services.gpu_engine.cuda.executor import StepExecutor
from services.gpu_engine.cuda.fused_decode import MOST_ROWS
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.step_arrays import HostStep, StepArrays, StepLimits
from services.gpu_engine.cuda.tensor_map import CTensorMap, tensor_map
from services.gpu_engine.cuda.weights import DeviceWeights
from services.gpu_engine.engine import Precision
from services.gpu_engine.models.float8 import to_e4m3
from tests.gpu.steps import POISON, as_array, config, sampling_rows

LIMITS = StepLimits(tokens=256, rows=36, pages_per_sequence=80)
CONTEXT = 16 * LIMITS.pages_per_sequence
MODELS: dict[str, dict[str, Any]] = {
    "small": {},
    "group of 5, partly rotated": {
        "architecture": "phi3",
        "hidden": 640,
        "heads": 10,
        "kv_heads": 2,
        "ffn": 1088,
        "partial_rotary": 0.75,
    },
    "norms of heads, head size 128": {"architecture": "qwen3", "hidden": 512, "head_dim": 128, "ffn": 1536},
    "as wide as Llama-3-8B": {
        "hidden": 4096,
        "heads": 16,
        "kv_heads": 2,
        "head_dim": 128,
        "ffn": 14336,
        "vocabulary": 32_003,
    },
    "more splits than warpgroups": {"hidden": 640, "heads": 10, "kv_heads": 10, "head_dim": 64},
}


class Bench:
    def __init__(
        self,
        device: Device,
        compiler: Compiler,
        changes: dict[str, Any],
        kv_cache: Precision = "bf16",
        limits: StepLimits = LIMITS,
    ) -> None:
        self.config = config(**changes, layers=2)
        source = RandomWeights(self.config)
        self.arrays = StepArrays(limits)
        self.executor = StepExecutor(
            device,
            Geometry(self.config, kv_cache=kv_cache),
            source.layers,
            DeviceWeights(source),
            step=self.arrays.addresses,
            limits=limits,
            pages=limits.rows * limits.pages_per_sequence,
            compiler=compiler,
            kv_scales=[(0.3, 1.9), (1.0, 0.25)],
        )
        self.kv_cache = kv_cache
        self.stream = Stream()

    def decode(self, lengths: list[int], rng: np.random.Generator) -> HostStep:
        """Rows that have so many tokens with this one, on pages in random order."""
        rows = len(lengths)
        pages = rng.permutation(LIMITS.rows * LIMITS.pages_per_sequence)
        return HostStep(
            token_ids=as_array(rng.integers(0, self.config.vocabulary, rows)),
            positions=as_array(lengths) - 1,
            row_start=as_array(np.arange(rows + 1)),
            kv_length=as_array(lengths),
            sequence=as_array(rng.permutation(LIMITS.rows)[:rows]),
            page_table=as_array(pages.reshape(LIMITS.rows, LIMITS.pages_per_sequence)),
            sample_row=as_array(rng.permutation(rows)),
            sampling=sampling_rows(rows, temperature=0.0),
            history=np.zeros(1, np.uint32),
        )

    def poison(self) -> None:
        for buffer in vars(self.executor.activations).values():
            buffer.fill(POISON)

    def run(self, step: HostStep, *, fused: bool) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Logits and tokens of the samples."""
        self.poison()
        self.arrays.upload(step)
        if fused:
            self.executor.launch_decode(self.stream, step.rows)
        else:
            self.executor.launch(self.stream, step.rows, step.rows)
        self.stream.synchronize()
        shape = (step.samples, self.config.vocabulary)
        return self.executor.activations.logits.download(np.float32, shape), self.arrays.result(step.samples).tokens


@pytest.fixture(scope="module", params=[(name, kv_cache) for kv_cache in ("bf16", "fp8") for name in MODELS], ids=str)
def bench(request: pytest.FixtureRequest, device: Device, compiler: Compiler) -> Bench:
    name, kv_cache = request.param
    return Bench(device, compiler, MODELS[name], kv_cache)


def fill_cache(bench: Bench, rng: np.random.Generator) -> None:
    """Keys and values between -2 and 2, or normal ones in FP8."""
    cache = bench.executor.cache
    if bench.kv_cache == "fp8":
        stored = to_e4m3(rng.standard_normal(1 << 20).astype(np.float32))
    else:
        words = rng.integers(0, 1 << 14, 1 << 20) | rng.integers(0, 2, 1 << 20) << 15
        stored = words.astype(np.uint16).view(np.uint8)
    cache.upload(np.resize(stored, cache.nbytes))


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 31, MOST_ROWS])
def test_a_fused_step_has_the_bits_of_separate_kernels(bench: Bench, rng: np.random.Generator, rows: int) -> None:
    fill_cache(bench, rng)
    lengths = rng.integers(1, CONTEXT, rows).tolist()
    lengths[0], lengths[-1] = 1, CONTEXT  # the shortest and the longest
    step = bench.decode(lengths, rng)
    cache = bench.executor.cache.download(np.uint8, (bench.executor.cache.nbytes,))
    expected = bench.run(step, fused=False)
    assert np.isfinite(expected[0]).all()
    after = bench.executor.cache.download(np.uint8, cache.shape)
    for _ in range(5):
        bench.executor.cache.upload(cache)
        logits, tokens = bench.run(step, fused=True)
        np.testing.assert_array_equal(logits, expected[0])
        np.testing.assert_array_equal(tokens, expected[1])
    np.testing.assert_array_equal(bench.executor.cache.download(np.uint8, cache.shape), after)


def test_a_captured_fused_step_serves_any_rows_up_to_its_bucket(bench: Bench, rng: np.random.Generator) -> None:
    fill_cache(bench, rng)
    with bench.stream.capture() as graphs:
        bench.executor.launch_decode(bench.stream, 16)
    for rows in (16, 1, 5, 16, 0, 9):
        step = bench.decode(rng.integers(1, CONTEXT, rows).tolist(), rng)
        expected = bench.run(step, fused=False)[0] if rows else None
        bench.poison()
        bench.arrays.upload(step)
        for _ in range(3):
            graphs[0].launch(bench.stream)
        bench.stream.synchronize()
        if expected is not None:
            found = bench.executor.activations.logits.download(np.float32, expected.shape)
            np.testing.assert_array_equal(found, expected)


def test_no_copy_reaches_beyond_the_buffers_of_a_small_step(
    device: Device, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps: list[tuple[int, int]] = []  # of activations and weights: first byte and the one after the last

    def noted(address: int, *, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> CTensorMap:
        last = sum((count - 1) * stride for count, stride in zip(shape, (2, *strides), strict=True))
        maps.append((address, address + last + 2))
        return tensor_map(address, shape=shape, strides=strides, box=box)

    monkeypatch.setattr(fused_decode, "tensor_map", noted)
    bench = Bench(device, compiler, {}, limits=StepLimits(tokens=24, rows=3, pages_per_sequence=2))
    held = [(buffer.pointer, buffer.pointer + buffer.nbytes) for buffer in vars(bench.executor.activations).values()]
    inside = [(first, end, limit) for first, end in maps for begin, limit in held if begin <= first < limit]
    assert len(inside) == 5 * len(fused_decode.WIDTHS)  # the inputs of all products
    assert all(end <= limit for _, end, limit in inside)
