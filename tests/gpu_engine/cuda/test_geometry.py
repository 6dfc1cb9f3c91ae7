"""Shapes that the kernels can't run are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.gpu_engine.cuda.errors import UnsupportedGeometryError
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.models.config import MixtureConfig
from tests.gpu_engine.models.tiny import tiny_config


@pytest.mark.parametrize(
    ("changes", "page_size", "message"),
    [
        ({"head_dim": 96}, 16, "head_dim is 96"),
        ({"head_dim": 64, "heads": 32, "kv_heads": 2}, 16, "heads per KV head is 16"),
        ({"head_dim": 64, "hidden": 100}, 16, "hidden is 100"),
        ({"head_dim": 64, "ffn": 12}, 16, "ffn is 12"),
        ({"head_dim": 64, "partial_rotary": 0.375}, 16, "rotary_dim is 24"),
        ({"head_dim": 64}, 8, "page_size is 8"),
        ({"head_dim": 64}, 48, "page_size is 48"),
    ],
)
def test_unsupported_shapes_are_named(changes: dict[str, Any], page_size: int, message: str) -> None:
    with pytest.raises(UnsupportedGeometryError, match=message):
        Geometry(tiny_config(**changes), page_size)


@pytest.mark.parametrize(
    ("hidden", "mixture", "message"),
    [
        (128, MixtureConfig(16, 2, 64, True), "hidden is 128, the CUDA kernels support a multiple of 256 in mixtures"),
        (256, MixtureConfig(24, 2, 64, True), "experts is 24"),
        (256, MixtureConfig(512, 2, 64, True), "experts is 512"),
        (256, MixtureConfig(64, 33, 64, True), "experts per token is 33"),
        (256, MixtureConfig(16, 2, 96, True), "expert ffn is 96"),
    ],
)
def test_unsupported_mixtures_are_named(hidden: int, mixture: MixtureConfig, message: str) -> None:
    with pytest.raises(UnsupportedGeometryError, match=message):
        Geometry(tiny_config(architecture="qwen3_moe", head_dim=64, hidden=hidden, mixture=mixture))


def test_bytes_of_a_page_are_keys_and_values_of_every_layer() -> None:
    geometry = Geometry(tiny_config(layers=3, heads=4, kv_heads=2, head_dim=64), 16)
    assert geometry.layer_page_bytes == 2 * 2 * 16 * 64 * 2
    assert geometry.page_bytes == 3 * geometry.layer_page_bytes
    assert replace(geometry, kv_cache="fp8").page_bytes == geometry.page_bytes // 2
