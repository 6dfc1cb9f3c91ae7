"""Products of at most 64 tokens against float64 NumPy, and their bits: the same in every bucket and every schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")

from services.gpu_engine.cuda.bfloat16 import from_bfloat16, to_bfloat16
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Device, Stream
from services.gpu_engine.cuda.skinny_gemm import MOST_TOKENS, SkinnyGemm
from services.gpu_engine.cuda.skinny_schedule import RING_BYTES, TILE_ROWS, WIDTHS, Schedule, schedules
from tests.gpu.steps import Floats, KernelBench, poisoned, relative_error

BF16_ERROR, FP32_ERROR = 4e-3, 1e-4
SHAPES = {  # outputs, depth
    "Llama-3-8B qkv": (6144, 4096),
    "Llama-3-8B output": (4096, 4096),
    "Llama-3-8B down": (4096, 14336),
    "SmolLM2-135M qkv": (960, 576),
    "SmolLM2-135M output": (576, 576),
    "SmolLM2-135M down": (576, 1536),
    "Phi-4 qkv": (7680, 5120),
    "Phi-4 down": (5120, 17920),
    "Qwen3-32B qkv": (10240, 5120),
    "Qwen3-32B output": (5120, 8192),
    "Qwen3-30B-A3B qkv": (5120, 2048),
    "Qwen3-30B-A3B output": (2048, 4096),
    "one chunk": (128, 64),
    "less than a chunk": (8, 8),
    "ragged": (200, 328),
}
GATED = {"Llama-3-8B": (14336, 4096), "SmolLM2-135M": (1536, 576), "Phi-4": (17920, 5120), "ragged": (328, 200)}


@pytest.fixture(scope="module")
def gemm(device: Device, compiler: Compiler) -> SkinnyGemm:
    if device.arch != "sm_90a":
        pytest.skip(f"skinny products are made for sm_90a, this is {device.arch}")
    return SkinnyGemm(device, compiler)


@pytest.fixture(scope="module")
def overlapping(device: Device) -> Stream:
    return Stream(overlap=True)


def random(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> tuple[Buffer, Floats]:
    """A bf16 buffer of normal values, and the values that it holds."""
    bits = to_bfloat16(rng.standard_normal(shape, np.float32) * np.float32(scale))
    return Buffer.of(bits), from_bfloat16(bits).astype(np.float64)


@pytest.mark.parametrize(("outputs", "depth"), SHAPES.values(), ids=SHAPES)
def test_a_product_is_right_and_a_row_has_the_same_bits_for_every_number_of_tokens(
    gemm: SkinnyGemm, stream: Stream, rng: np.random.Generator, outputs: int, depth: int
) -> None:
    x, values = random(rng, MOST_TOKENS, depth)
    weight, factors = random(rng, outputs, depth, scale=depth**-0.5)

    def product(tokens: int, first: int = 0) -> NDArray[np.uint16]:
        out = poisoned(2 * MOST_TOKENS * outputs)
        row = x.pointer + 2 * first * depth
        gemm.matmul(stream, row, weight.pointer, out.pointer, m=tokens, n=outputs, k=depth)
        found = out.download(np.uint16, (MOST_TOKENS, outputs))
        assert (found[tokens:] == 0xFFFF).all(), "rows beyond the product were written"
        return found[:tokens]

    whole = product(MOST_TOKENS)
    assert relative_error(from_bfloat16(whole), values @ factors.T) < BF16_ERROR
    for tokens in range(1, MOST_TOKENS + 1):
        np.testing.assert_array_equal(product(tokens), whole[:tokens])
        first = MOST_TOKENS - tokens
        np.testing.assert_array_equal(product(tokens, first), whole[first:])


@pytest.mark.parametrize(("outputs", "depth"), [(49152, 576), (128256, 4096), (32003, 256), (151936, 2048)])
def test_logits_are_float32_and_the_same_bits_for_every_number_of_rows(
    gemm: SkinnyGemm, stream: Stream, rng: np.random.Generator, outputs: int, depth: int
) -> None:
    x, values = random(rng, MOST_TOKENS, depth)
    weight, factors = random(rng, outputs, depth, scale=depth**-0.5)

    def product(rows: int) -> NDArray[np.float32]:
        out = poisoned(4 * MOST_TOKENS * outputs)
        gemm.matmul(stream, x.pointer, weight.pointer, out.pointer, m=rows, n=outputs, k=depth, fp32_out=True)
        found = out.download(np.float32, (MOST_TOKENS, outputs))
        assert np.isnan(found[rows:]).all()
        return found[:rows]

    whole = product(MOST_TOKENS)
    assert relative_error(whole, values @ factors.T) < FP32_ERROR
    for rows in (1, 2, 7, 8, 9, 16, 17, 31, 33, 63):
        np.testing.assert_array_equal(product(rows), whole[:rows])


@pytest.mark.parametrize(("ffn", "depth"), GATED.values(), ids=GATED)
@pytest.mark.parametrize("tokens", [1, 8, 13, 32, 64])
def test_a_product_with_swiglu_has_the_bits_of_the_two_kernels(
    device: Device,
    compiler: Compiler,
    gemm: SkinnyGemm,
    stream: Stream,
    rng: np.random.Generator,
    ffn: int,
    depth: int,
    tokens: int,
) -> None:
    bench = KernelBench(device, compiler, rng, [(0, tokens)], ffn=ffn)
    x, _ = random(rng, tokens, depth)
    weight, _ = random(rng, 2 * ffn, depth, scale=depth**-0.5)
    gate_up = poisoned(2 * tokens * 2 * ffn)
    apart, fused = poisoned(2 * tokens * ffn), poisoned(2 * MOST_TOKENS * ffn)
    gemm.matmul(stream, x.pointer, weight.pointer, gate_up.pointer, m=tokens, n=2 * ffn, k=depth)
    bench.kernels.swiglu(stream, tokens, gate_up.pointer, apart.pointer)
    gemm.swiglu(stream, x.pointer, weight.pointer, fused.pointer, m=tokens, n=ffn, k=depth)
    found = fused.download(np.uint16, (MOST_TOKENS, ffn))
    np.testing.assert_array_equal(found[:tokens], apart.download(np.uint16, (tokens, ffn)))
    assert (found[tokens:] == 0xFFFF).all()
    assert np.isfinite(from_bfloat16(found[:tokens])).all()


def all_schedules() -> list[Schedule]:
    """Every tile, runs that fill and overfill the weight, small and large rings."""
    rings = (3 * 24 << 10, RING_BYTES // 2, RING_BYTES)
    return [Schedule(rows, run, ring) for rows in TILE_ROWS for run, ring in zip((1, 2, 7), rings, strict=True)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("outputs", "depth"), [(4096, 1536), (1000, 328)])
def test_no_schedule_changes_a_bit(
    gemm: SkinnyGemm, stream: Stream, rng: np.random.Generator, outputs: int, depth: int, width: int
) -> None:
    x, _ = random(rng, width, depth)
    weight, _ = random(rng, outputs, depth, scale=depth**-0.5)
    # The gate's and up's rows of half as many outputs, of the same matrix.
    ffn = outputs // 2

    def product(schedule: Schedule | None) -> NDArray[np.uint16]:
        out, activated = poisoned(2 * width * outputs), poisoned(2 * width * ffn)
        operands = x.pointer, weight.pointer
        gemm.matmul(stream, *operands, out.pointer, m=width, n=outputs, k=depth, schedule=schedule)
        gemm.swiglu(stream, *operands, activated.pointer, m=width, n=ffn // 8 * 8, k=depth, schedule=schedule)
        parts = out.download(np.uint16, (width * outputs,)), activated.download(np.uint16, (width * (ffn // 8 * 8),))
        return np.concatenate(parts)

    expected = product(None)
    assert np.isfinite(from_bfloat16(expected)).all()
    for schedule in all_schedules():
        np.testing.assert_array_equal(product(schedule), expected, err_msg=str(schedule))


@dataclass
class Chain:
    """A small model's feed-forward layers, one after the other: each product reads what the one before wrote."""

    gemm: SkinnyGemm
    rng: np.random.Generator
    tokens: int
    layers: int = 6
    hidden: int = 2048
    ffn: int = 3072

    def __post_init__(self) -> None:
        self.weights = [
            (
                random(self.rng, 2 * self.ffn, self.hidden, scale=0.04)[0],
                random(self.rng, self.hidden, self.ffn, scale=0.008)[0],
            )
            for _ in range(self.layers)
        ]  # so scaled that what the layers multiply neither overflows nor vanishes
        self.start, _ = random(self.rng, self.tokens, self.hidden)
        self.values = self.start.download(np.uint16, (self.tokens, self.hidden))
        self.x = Buffer(self.values.nbytes)
        self.activated = Buffer(2 * self.tokens * self.ffn)

    def launch(
        self, stream: Stream, change: Callable[[Schedule], Schedule], after_each: Callable[[], None] = lambda: None
    ) -> None:
        def schedule(weight_rows: int) -> Schedule:
            return change(schedules(weight_rows, 100)[0])

        hidden, ffn, x, activated = self.hidden, self.ffn, self.x.pointer, self.activated.pointer
        for gate_up, down in self.weights:
            plan = schedule(2 * ffn)
            self.gemm.swiglu(stream, x, gate_up.pointer, activated, m=self.tokens, n=ffn, k=hidden, schedule=plan)
            after_each()
            plan = schedule(hidden)
            self.gemm.matmul(stream, activated, down.pointer, x, m=self.tokens, n=hidden, k=ffn, schedule=plan)
            after_each()

    def run(self, launch: Callable[[], None]) -> NDArray[np.uint16]:
        """Bits of the last product."""
        self.x.upload(self.values)
        self.activated.fill(0xFF)
        launch()
        found = self.x.download(np.uint16, (self.tokens, self.hidden))
        assert np.isfinite(from_bfloat16(found)).all()
        return found


CHANGES: list[Callable[[Schedule], Schedule]] = [
    lambda schedule: schedule,
    lambda schedule: replace(schedule, ring=RING_BYTES // 4),  # several blocks a multiprocessor
]


@pytest.mark.parametrize("tokens", [1, 12, 32, 64])
def test_overlapping_launches_give_the_bits_of_launches_one_at_a_time(
    gemm: SkinnyGemm, overlapping: Stream, rng: np.random.Generator, tokens: int
) -> None:
    """On a stream and in a graph, with and without room for the successor."""
    chain = Chain(gemm, rng, tokens)
    alone = chain.run(lambda: chain.launch(overlapping, CHANGES[0], overlapping.synchronize))
    for change in CHANGES:
        with overlapping.capture() as graphs:
            chain.launch(overlapping, change)
        for _ in range(20):
            np.testing.assert_array_equal(chain.run(lambda: chain.launch(overlapping, change)), alone)  # noqa: B023
            np.testing.assert_array_equal(chain.run(lambda: graphs[0].launch(overlapping)), alone)


def test_more_tokens_than_a_build_holds_are_refused(gemm: SkinnyGemm, stream: Stream) -> None:
    with pytest.raises(ValueError, match=r"m=65 .* more than 64"):
        gemm.matmul(stream, 0, 0, 0, m=65, n=128, k=64)
