"""Which weights stay in FP8 on the device, and how much memory that takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")

from services.gpu_engine.cuda.weights import fp8_stacks, scratch_bytes, weight_bytes
from services.gpu_engine.models.checkpoint import FAMILIES
from services.gpu_engine.models.config import MixtureConfig
from services.gpu_engine.models.fp8_weights import quantized_specs
from tests.gpu_engine.models.fp8 import wide_config

CONFIG = wide_config("qwen3")
LAYERS = FAMILIES["qwen3"](CONFIG)
ALL = {spec.name for spec in quantized_specs(LAYERS)}


def test_a_stack_stays_in_fp8_if_all_of_it_is() -> None:
    assert fp8_stacks(LAYERS, ALL) == ALL
    assert fp8_stacks(LAYERS, set()) == frozenset()
    mixed = fp8_stacks(LAYERS, ALL - {"layers.0.attention.key"})
    assert ALL - mixed == {f"layers.0.attention.{name}" for name in ("query", "key", "value")}


def test_embeddings_and_rows_that_are_not_whole_pieces_do_not_stay_in_fp8() -> None:
    assert "embedding" not in fp8_stacks(LAYERS, ALL | {"embedding", "head"})
    narrow = FAMILIES["llama"](replace(wide_config(), ffn=328))
    names = {spec.name for spec in quantized_specs(narrow)}
    assert names - fp8_stacks(narrow, names) == {"layers.0.ffn.down", "layers.1.ffn.down"}


def test_experts_are_dequantized_as_they_load() -> None:
    config = wide_config("qwen3_moe", mixture=MixtureConfig(16, 4, 160, normalized=True))
    layers = FAMILIES["qwen3_moe"](config)
    kept = fp8_stacks(layers, {spec.name for spec in quantized_specs(layers)})
    assert {name.split(".")[2] for name in kept} == {"attention"}


def test_memory_is_a_byte_a_weight_with_its_scales_and_room_for_the_largest_matrix() -> None:
    weights = sum(spec.shape[0] * spec.shape[1] for spec in quantized_specs(LAYERS))
    scales = sum(4 * spec.shape[0] * -(-spec.shape[1] // 128) for spec in quantized_specs(LAYERS))
    saved = weight_bytes(LAYERS) - weight_bytes(LAYERS, ALL)
    assert abs(saved - (weights - scales)) < 256 * len(ALL) * 2  # alignment
    assert scratch_bytes(LAYERS, ALL) == 2 * 2 * CONFIG.ffn * CONFIG.hidden
    assert scratch_bytes(LAYERS, set()) == 0
