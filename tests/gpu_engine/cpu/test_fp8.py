"""FP8 on the cpu engine: exact weights, the bits of dequantized ones, and keys and values that e4m3 can hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from services.gpu_engine.cpu._kernels import Arena, Kernels, Linear
from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.config import MixtureConfig
from services.gpu_engine.models.float8 import VALUES, to_e4m3
from services.gpu_engine.models.fp8_weights import Fp8Weights
from services.gpu_engine.models.loader import open_checkpoint
from tests.gpu_engine.cpu import reference
from tests.gpu_engine.cpu.executor import Executor
from tests.gpu_engine.cpu.make_family_goldens import prompt
from tests.gpu_engine.cpu.test_linear import ROWS, assert_product, instruction_sets, product
from tests.gpu_engine.models.fp8 import STYLES, wide_config, write_fp8
from tests.gpu_engine.models.tiny import random_weights, write_hugging_face

CODES = np.arange(256, dtype=np.uint8)
MODELS = {
    "llama": wide_config(),
    "phi3": wide_config("phi3"),
    "qwen3_moe": wide_config("qwen3_moe", mixture=MixtureConfig(16, 4, 160, normalized=True)),
}
for each in MODELS.values():
    assert each.head_dim % 16 == 0


def matrix(outputs: int, inputs: int, seed: int = 0) -> tuple[Linear, NDArray[np.float32]]:
    """A matrix with a scale for each block of 32 inputs, and what it is worth."""
    rng = np.random.default_rng(seed)
    codes = to_e4m3(rng.standard_normal((outputs, inputs)).astype(np.float32) * 100)
    scales = rng.uniform(0.001, 0.1, (outputs, -(-inputs // 32))).astype(np.float32)
    worth = VALUES[codes] * scales.repeat(32, axis=1)[:, :inputs]
    return Linear(Arena(), [codes], ["F8_E4M3"], [inputs], [scales]), worth


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("scale", [1.0, 0.0123, 2.0**-126, 2.0**100])
def test_all_codes_are_exact_under_any_scale(instruction_set: str, scale: float) -> None:
    scales = np.full((1, 8), scale, np.float32)
    linear = Linear(Arena(), [CODES[None]], ["F8_E4M3"], [256], [scales])
    out = np.zeros((1, 256), np.float32)
    Kernels(1, instruction_set).embed(linear, np.zeros(1, np.int32), 1, out)
    np.testing.assert_array_equal(out[0], VALUES * np.float32(scale))


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("inputs", [160, 100])
def test_products_match_float64(instruction_set: str, inputs: int) -> None:
    linear, worth = matrix(83, inputs)
    kernels = Kernels(1, instruction_set)
    for rows in ROWS:
        x = np.random.default_rng(rows).standard_normal((rows, inputs)).astype(np.float32)
        assert_product(product(kernels, linear, x), x, worth)


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_a_row_gets_the_same_bits_in_every_batch_and_on_any_number_of_threads(instruction_set: str) -> None:
    linear, _ = matrix(400, 96)
    alone, together = Kernels(1, instruction_set), Kernels(3, instruction_set)
    x = np.random.default_rng(0).standard_normal((max(ROWS), 96)).astype(np.float32)
    expected = np.concatenate([product(alone, linear, row[None]) for row in x])
    for rows in ROWS:
        for kernels in (alone, together):
            np.testing.assert_array_equal(product(kernels, linear, x[:rows]), expected[:rows])


def test_scales_belong_to_fp8_and_have_its_shape() -> None:
    codes, scales = np.zeros((20, 64), np.uint8), np.ones((20, 2), np.float32)
    with pytest.raises(ValueError, match="F8_E4M3 matrices have scales"):
        Linear(Arena(), [codes], ["F8_E4M3"], [64])
    with pytest.raises(ValueError, match="F8_E4M3 matrices have scales"):
        Linear(Arena(), [codes], ["F16"], [32], [scales[:, :1].copy()])
    with pytest.raises(ValueError, match=r"scales must be \[outputs, blocks of 32 inputs\]"):
        Linear(Arena(), [codes], ["F8_E4M3"], [64], [scales[:, :1].copy()])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("style", STYLES)
def test_an_fp8_checkpoint_gives_the_bits_of_its_dequantized_weights(tmp_path: Path, style: str, model: str) -> None:
    config, tokens = MODELS[model], prompt()[:40]
    worth = write_fp8(tmp_path / "fp8", config, random_weights(config), STYLES[style])
    write_hugging_face(tmp_path / "plain", config, worth, "F32")
    got = Executor(open_checkpoint(tmp_path / "fp8"), threads=2).run({0: tokens})
    np.testing.assert_array_equal(got, Executor(open_checkpoint(tmp_path / "plain")).run({0: tokens}))
    exact = reference.logits(config, worth, tokens)[-1]
    np.testing.assert_allclose(got[0], exact, rtol=0, atol=1e-4)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    config = wide_config("qwen3")
    write_hugging_face(tmp_path, config, random_weights(config), "BF16")
    return open_checkpoint(tmp_path)


@pytest.mark.parametrize("fp8_weights", [False, True])
@pytest.mark.parametrize("fp8_kv", [False, True])
def test_a_sequence_gets_the_same_bits_in_every_batch_and_chunking(
    checkpoint: Checkpoint, fp8_weights: bool, fp8_kv: bool
) -> None:
    model = Fp8Weights(checkpoint) if fp8_weights else checkpoint
    prompts = [prompt()[start : start + length] for start, length in ((0, 90), (3, 1), (5, 33), (11, 17))]
    expected = [Executor(model, fp8_kv=fp8_kv).run({0: tokens})[0] for tokens in prompts]
    together = Executor(model, threads=2, fp8_kv=fp8_kv)
    np.testing.assert_array_equal(together.run(dict(enumerate(prompts))), expected)
    chunked = Executor(model, threads=2, page_size=32, fp8_kv=fp8_kv)
    for tokens in (prompts[0][:7], prompts[0][7:8], prompts[0][8:]):
        out = chunked.run({5: tokens})[0]
    np.testing.assert_array_equal(out, expected[0])


def test_keys_and_values_are_rounded_to_e4m3_times_their_scale() -> None:
    tokens, heads, kv_heads, dim, page = 40, 4, 2, 32, 16
    rng = np.random.default_rng(0)
    qkv = (rng.standard_normal((tokens, (heads + 2 * kv_heads) * dim)) * 3).astype(np.float32)
    qkv[0, -5:] = [1e4, -1e4, 2.0**-12, 0, 448 * 0.37]
    angles = np.zeros((tokens, dim // 2), np.float32)
    slots = rng.permutation(64)[:tokens].astype(np.int32)
    caches = []
    for scales in (None, (0.25, 0.37)):
        keys = np.zeros((4, kv_heads, dim, page), np.float32)
        values = np.zeros((4, kv_heads, page, dim), np.float32)
        arguments = qkv.copy(), heads, np.cos(angles), np.sin(angles), slots, tokens, keys, values
        Kernels(2).rotate_and_store(*arguments, fp8_scales=scales)
        caches.append((keys, values))
    for plain, rounded, scale in zip(*caches, (0.25, 0.37), strict=True):
        exact = VALUES[to_e4m3(plain / np.float32(scale))] * np.float32(scale)
        np.testing.assert_array_equal(rounded, exact)
        assert (rounded != plain).any()
