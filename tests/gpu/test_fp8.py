"""FP8 weights on the GPU: exact codes, the bits of bf16 products of dequantized weights; a model's tokens, with FP8
pages too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")

from services.gpu_engine.cuda.bfloat16 import from_bfloat16, to_bfloat16
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Device, Stream
from services.gpu_engine.cuda.fp8_matrix import SCALE_COLUMNS, Fp8Matrix
from services.gpu_engine.cuda.fp8_products import MOST_TOKENS, Fp8Products
from services.gpu_engine.cuda.products import MatrixProducts
from services.gpu_engine.cuda.skinny_gemm import SkinnyGemm
from services.gpu_engine.engine import EngineLimits, Precision
from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.float8 import VALUES, to_e4m3
from services.gpu_engine.models.fp8_weights import Fp8Weights
from tests.gpu.model_serving import serving_model
from tests.gpu.steps import KernelBench, poisoned, relative_error
from tests.gpu.test_smollm2 import CLEAR_MARGIN, GOLDENS
from tests.gpu_engine.cpu.executor import Executor

BF16_ERROR = 4e-3
SCRATCH_BYTES = 256 << 20
SHAPES = {  # outputs, depth
    "Llama-3-8B qkv": (6144, 4096),
    "Llama-3-8B down": (4096, 14336),
    "SmolLM2-135M qkv": (960, 576),
    "SmolLM2-135M down": (576, 1536),
    "less than a stage": (8, 16),
    "ragged": (200, 336),
}


@dataclass(frozen=True)
class Weight:
    matrix: Fp8Matrix
    buffers: tuple[Buffer, Buffer]
    values: NDArray[np.float32]  # dequantized to bf16
    bf16: Buffer


def weight_of(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> Weight:
    """scales: [rows, blocks]."""
    per_value = scales.repeat(SCALE_COLUMNS, 1)[:, : codes.shape[1]] if scales.shape[1] > 1 else scales
    bits = to_bfloat16(VALUES[codes] * per_value)
    buffers = Buffer.of(codes), Buffer.of(np.ascontiguousarray(scales.T))
    matrix = Fp8Matrix(buffers[0].pointer, buffers[1].pointer, scales.shape[1])
    return Weight(matrix, buffers, from_bfloat16(bits), Buffer.of(bits))


def random_weight(rng: np.random.Generator, rows: int, columns: int, blocks: bool) -> Weight:
    codes = to_e4m3(rng.standard_normal((rows, columns)).astype(np.float32) * 100)
    count = -(-columns // SCALE_COLUMNS) if blocks else 1
    scales = rng.uniform(0.5, 2, (rows, count)).astype(np.float32) * np.float32(columns**-0.5 / 100)
    return weight_of(codes, scales)


@pytest.fixture(scope="module")
def fp8(device: Device, compiler: Compiler) -> Fp8Products:
    if device.arch != "sm_90a":
        pytest.skip(f"FP8 products are made for sm_90a, this is {device.arch}")
    return Fp8Products(device, compiler, MatrixProducts(device, None), Buffer(SCRATCH_BYTES))


@pytest.fixture(scope="module")
def gemm(device: Device, compiler: Compiler) -> SkinnyGemm:
    return SkinnyGemm(device, compiler)


@pytest.mark.parametrize("blocks", [False, True])
def test_all_codes_are_dequantized_as_on_the_host(fp8: Fp8Products, stream: Stream, blocks: bool) -> None:
    codes = np.stack([np.roll(np.arange(256, dtype=np.uint8), shift) for shift in range(40)])
    scales = np.random.default_rng(0).uniform(1e-4, 10, (40, 2 if blocks else 1)).astype(np.float32)
    weight = weight_of(codes, scales)
    at = fp8.dequantize(stream, weight.matrix, rows=40, columns=256)
    stream.synchronize()
    assert at == fp8.scratch.pointer
    got = from_bfloat16(fp8.scratch.download(np.uint16, (40, 256)))
    np.testing.assert_array_equal(got, weight.values)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("outputs", "depth"), SHAPES.values(), ids=SHAPES)
def test_a_product_has_the_bits_of_dequantized_weights_for_every_number_of_tokens(
    fp8: Fp8Products,
    gemm: SkinnyGemm,
    stream: Stream,
    rng: np.random.Generator,
    outputs: int,
    depth: int,
    blocks: bool,
) -> None:
    weight = random_weight(rng, outputs, depth, blocks)
    bits = to_bfloat16(rng.standard_normal((MOST_TOKENS, depth), np.float32))
    x = Buffer.of(bits)
    exact = from_bfloat16(bits).astype(np.float64) @ weight.values.astype(np.float64).T
    for tokens in (1, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 130, MOST_TOKENS):
        out = poisoned(2 * (MOST_TOKENS + 1) * outputs)
        fp8.matmul(stream, x.pointer, weight.matrix, out.pointer, m=tokens, n=outputs, k=depth)
        found = out.download(np.uint16, (MOST_TOKENS + 1, outputs))
        assert (found[tokens:] == 0xFFFF).all(), "rows beyond the product were written"
        assert relative_error(from_bfloat16(found[:tokens]), exact[:tokens]) < BF16_ERROR
        for first in range(0, tokens, 64):
            count = min(64, tokens - first)
            plain = poisoned(2 * 64 * outputs)
            row = x.pointer + 2 * first * depth
            gemm.matmul(stream, row, weight.bf16.pointer, plain.pointer, m=count, n=outputs, k=depth)
            expected = plain.download(np.uint16, (64, outputs))[:count]
            np.testing.assert_array_equal(found[first : first + count], expected)


@pytest.mark.parametrize("blocks", [False, True])
def test_products_of_more_tokens_are_those_of_dequantized_weights(
    fp8: Fp8Products, stream: Stream, rng: np.random.Generator, blocks: bool
) -> None:
    tokens, outputs, depth = MOST_TOKENS + 44, 960, 576
    weight = random_weight(rng, outputs, depth, blocks)
    bits = to_bfloat16(rng.standard_normal((tokens, depth), np.float32))
    x, out = Buffer.of(bits), poisoned(2 * tokens * outputs)
    fp8.matmul(stream, x.pointer, weight.matrix, out.pointer, m=tokens, n=outputs, k=depth)
    stream.synchronize()
    exact = from_bfloat16(bits).astype(np.float64) @ weight.values.astype(np.float64).T
    assert relative_error(from_bfloat16(out.download(np.uint16, (tokens, outputs))), exact) < BF16_ERROR


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("ffn", "depth"), [(14336, 4096), (1536, 576), (328, 208)])
@pytest.mark.parametrize("tokens", [1, 13, 64, 100])
def test_a_product_with_swiglu_has_the_bits_of_the_two_kernels(
    device: Device,
    compiler: Compiler,
    fp8: Fp8Products,
    stream: Stream,
    rng: np.random.Generator,
    ffn: int,
    depth: int,
    tokens: int,
    blocks: bool,
) -> None:
    bench = KernelBench(device, compiler, rng, [(0, tokens)], ffn=ffn)
    x = Buffer.of(to_bfloat16(rng.standard_normal((tokens, depth), np.float32)))
    weight = random_weight(rng, 2 * ffn, depth, blocks)
    gate_up = poisoned(2 * tokens * 2 * ffn)
    apart, fused = poisoned(2 * tokens * ffn), poisoned(2 * tokens * ffn)
    fp8.matmul(stream, x.pointer, weight.matrix, gate_up.pointer, m=tokens, n=2 * ffn, k=depth)
    bench.kernels.swiglu(stream, tokens, gate_up.pointer, apart.pointer)
    fp8.swiglu(stream, x.pointer, weight.matrix, fused.pointer, m=tokens, n=ffn, k=depth)
    found = fused.download(np.uint16, (tokens, ffn))
    np.testing.assert_array_equal(found, apart.download(np.uint16, (tokens, ffn)))
    assert np.isfinite(from_bfloat16(found)).all()


@pytest.mark.model
@pytest.mark.parametrize(("weights", "kv_cache"), [("fp8", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")])
def test_a_models_greedy_tokens_are_those_of_the_cpu_engine_wherever_they_are_clear(
    smollm2: Checkpoint, weights: Precision, kv_cache: Precision
) -> None:
    prompts, count = [golden["prompt"] for golden in GOLDENS[:6]], 16
    model = Fp8Weights(smollm2) if weights == "fp8" else smollm2
    executor = Executor(model, threads=8, sequences=len(prompts), context=512, fp8_kv=kv_cache == "fp8")
    logits = executor.run(dict(enumerate(prompts)))
    expected: list[list[int]] = [[] for _ in prompts]
    margins: list[list[float]] = [[] for _ in prompts]
    for _ in range(count):
        for index, row in enumerate(logits):
            best = np.partition(row, -2)[-2:]
            expected[index].append(int(row.argmax()))
            margins[index].append(float(best[1] - best[0]))
        logits = executor.run({index: [tokens[-1]] for index, tokens in enumerate(expected)})
    limits = EngineLimits(
        page_size=16,
        kv_pages=512,
        max_running=8,
        max_batched_tokens=512,
        context=1024,
        max_waiting=64,
        lease_timeout_ms=10_000,
    )
    same = 0
    with serving_model(model, limits, stored_fp8=model.fp8_names(), kv_cache=kv_cache) as client:
        streams = [client.submit(prompt, count) for prompt in prompts]
        client.finish()
    for stream, tokens, margin in zip(streams, expected, margins, strict=True):
        differs = next((i for i in range(count) if stream.tokens[i] != tokens[i]), count)
        assert differs == count or margin[differs] < CLEAR_MARGIN, (differs, margin[differs])
        same += differs
    assert same > 0.6 * count * len(prompts)
