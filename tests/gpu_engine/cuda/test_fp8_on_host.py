"""The kernels of FP8 weights, compiled for the host: all 256 codes, and the bits of bf16 products in every build."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gpu_engine.cuda.skinny_schedule import WIDTHS
from tests.gpu_engine.cuda.on_host import run_on_host


@pytest.mark.parametrize("width", WIDTHS)
def test_products_have_the_bits_of_dequantized_weights(tmp_path: Path, width: int) -> None:
    result = run_on_host(tmp_path, "fp8.cpp", {"SKINNY_TOKENS": width})
    assert result.returncode == 0, result.stdout + result.stderr
