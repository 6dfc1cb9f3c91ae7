"""Products of at most 64 tokens against float64 NumPy, and their bits: the same in every bucket, beside any others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")

from services.gpu_engine.cuda.bfloat16 import from_bfloat16, to_bfloat16
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Device, Stream
from services.gpu_engine.cuda.skinny_gemm import MOST_TOKENS, Norm, Overlap, SkinnyGemm, square_bytes
from tests.gpu.steps import Floats, bfloat16_of, poisoned, relative_error

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
OVERLAPS = [Overlap(), Overlap(early=0), Overlap(early=1 << 20), Overlap(prefetched=1 << 20, early=5)]


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
        gemm.matmul(stream, x.pointer + 2 * first * depth, weight.pointer, out.pointer, m=tokens, n=outputs, k=depth)
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
def test_swiglu_of_normed_rows(
    gemm: SkinnyGemm, stream: Stream, rng: np.random.Generator, ffn: int, depth: int, tokens: int
) -> None:
    x, values = random(rng, tokens, depth)
    weight, factors = random(rng, 2 * ffn, depth, scale=depth**-0.5)
    parts = rng.random((square_bytes(depth) // (4 * MOST_TOKENS), MOST_TOKENS), np.float32) * depth
    squares, out = Buffer.of(parts), poisoned(2 * MOST_TOKENS * ffn)
    scale = 1 / np.sqrt(parts.astype(np.float64).sum(0)[:tokens] / depth + 1e-5)
    sums = scale[:, None] * (values @ factors.T)
    gate, up = sums[:, :ffn], sums[:, ffn:]
    norm = Norm(squares.pointer, depth, 1e-5)
    gemm.swiglu(stream, x.pointer, weight.pointer, out.pointer, m=tokens, n=ffn, k=depth, norm=norm)
    assert relative_error(bfloat16_of(out, tokens, ffn), gate / (1 + np.exp(-gate)) * up) < BF16_ERROR
    assert np.isnan(bfloat16_of(out, MOST_TOKENS, ffn)[tokens:]).all()


@pytest.mark.parametrize(("hidden", "depth"), [(4096, 4096), (576, 1536), (5120, 8192), (200, 328)])
@pytest.mark.parametrize("tokens", [1, 8, 13, 32, 64])
def test_a_sum_with_the_residual_stream_and_the_norm_behind_it(
    gemm: SkinnyGemm, stream: Stream, rng: np.random.Generator, hidden: int, depth: int, tokens: int
) -> None:
    x, values = random(rng, tokens, depth)
    weight, factors = random(rng, hidden, depth, scale=depth**-0.5)
    norm_weight, norm_factors = random(rng, hidden)
    stored = rng.standard_normal((tokens, hidden), np.float32) * 3
    residual, prepared, squares = Buffer.of(stored), poisoned(2 * tokens * hidden), poisoned(square_bytes(hidden))
    gemm.add(
        stream,
        x.pointer,
        weight.pointer,
        residual.pointer,
        m=tokens,
        n=hidden,
        k=depth,
        norm_weight=norm_weight.pointer,
        out=prepared.pointer,
        squares=squares.pointer,
    )
    total = stored + values @ factors.T
    assert relative_error(residual.download(np.float32, (tokens, hidden)), total) < FP32_ERROR
    assert relative_error(bfloat16_of(prepared, tokens, hidden), total * norm_factors) < BF16_ERROR

    head, head_factors = random(rng, 256, hidden, scale=hidden**-0.5)
    out = poisoned(4 * tokens * 256)
    gemm.matmul(
        stream,
        prepared.pointer,
        head.pointer,
        out.pointer,
        m=tokens,
        n=256,
        k=hidden,
        fp32_out=True,
        norm=Norm(squares.pointer, hidden, 1e-5),
    )
    normed = total / np.sqrt((total**2).mean(1, keepdims=True) + 1e-5) * norm_factors
    assert relative_error(out.download(np.float32, (tokens, 256)), normed @ head_factors.T) < BF16_ERROR


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
            (random(self.rng, 2 * self.ffn, self.hidden, scale=0.02)[0], random(self.rng, self.hidden, self.ffn)[0])
            for _ in range(self.layers)
        ]
        self.start = self.rng.standard_normal((self.tokens, self.hidden), np.float32)
        self.norm_weight, _ = random(self.rng, self.hidden)
        self.prepared, _ = random(self.rng, self.tokens, self.hidden)
        self.prepared_start = self.prepared.download(np.uint16, (self.tokens, self.hidden))
        self.squares_start = np.full((square_bytes(self.hidden) // 4,), 100.0, np.float32)
        self.squares = Buffer.of(self.squares_start)
        self.residual = Buffer.of(self.start)
        self.activated = poisoned(2 * self.tokens * self.ffn)

    def launch(self, stream: Stream, overlap: Overlap, after_each: Callable[[], None] = lambda: None) -> None:
        norm = Norm(self.squares.pointer, self.hidden, 1e-5)
        for gate_up, down in self.weights:
            self.gemm.swiglu(
                stream,
                self.prepared.pointer,
                gate_up.pointer,
                self.activated.pointer,
                m=self.tokens,
                n=self.ffn,
                k=self.hidden,
                norm=norm,
                overlap=overlap,
            )
            after_each()
            self.gemm.add(
                stream,
                self.activated.pointer,
                down.pointer,
                self.residual.pointer,
                m=self.tokens,
                n=self.hidden,
                k=self.ffn,
                norm_weight=self.norm_weight.pointer,
                out=self.prepared.pointer,
                squares=self.squares.pointer,
                overlap=overlap,
            )
            after_each()

    def run(self, launch: Callable[[], None]) -> NDArray[np.uint32]:
        """Bits of the residual stream after all layers."""
        self.residual.upload(self.start)
        self.prepared.upload(self.prepared_start)
        self.squares.upload(self.squares_start)
        self.activated.fill(0xFF)
        launch()
        found = self.residual.download(np.uint32, (self.tokens, self.hidden))
        assert np.isfinite(found.view(np.float32)).all()
        return found


@pytest.mark.parametrize("tokens", [1, 12, 32, 64])
def test_overlapping_launches_give_the_bits_of_launches_one_at_a_time(
    gemm: SkinnyGemm, overlapping: Stream, rng: np.random.Generator, tokens: int
) -> None:
    """On a stream and in a graph, however early a successor begins and whatever it prefetches."""
    chain = Chain(gemm, rng, tokens)
    alone = chain.run(lambda: chain.launch(overlapping, Overlap(), overlapping.synchronize))
    for overlap in OVERLAPS:
        with overlapping.capture() as graphs:
            chain.launch(overlapping, overlap)
        for _ in range(20):
            np.testing.assert_array_equal(chain.run(lambda: chain.launch(overlapping, overlap)), alone)  # noqa: B023
            np.testing.assert_array_equal(chain.run(lambda: graphs[0].launch(overlapping)), alone)


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 100])
@pytest.mark.parametrize(("outputs", "depth"), [(576, 1536), (1000, 328), (4096, 4096)])
def test_any_number_of_multiprocessors_shares_the_weights(
    device: Device,
    compiler: Compiler,
    stream: Stream,
    rng: np.random.Generator,
    multiprocessors: int,
    outputs: int,
    depth: int,
) -> None:
    gemm = SkinnyGemm(device, compiler, multiprocessors)
    x, values = random(rng, 20, depth)
    weight, factors = random(rng, outputs, depth, scale=depth**-0.5)
    out = poisoned(4 * 20 * outputs)
    gemm.matmul(stream, x.pointer, weight.pointer, out.pointer, m=20, n=outputs, k=depth, fp32_out=True)
    assert relative_error(out.download(np.float32, (20, outputs)), values @ factors.T) < FP32_ERROR


def test_more_tokens_than_a_build_holds_are_refused(gemm: SkinnyGemm, stream: Stream) -> None:
    with pytest.raises(ValueError, match=r"tokens=65.* more than 64 tokens"):
        gemm.matmul(stream, 0, 0, 0, m=65, n=128, k=64)
