"""What prefill attention copies into shared memory, compiled for the host: operands from pages in bf16 and in FP8."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.engine import Precision
from tests.gpu_engine.cuda.on_host import run_on_host
from tests.gpu_engine.models.tiny import tiny_config


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [16, 128])
def test_blocks_of_operands_are_what_the_pages_hold(
    tmp_path: Path, kv_cache: Precision, head_dim: int, page_size: int
) -> None:
    geometry = Geometry(tiny_config(heads=8, kv_heads=2, head_dim=head_dim), page_size, kv_cache)
    defines = {name.removeprefix("BLINK_"): value for name, value in geometry.defines().items()}
    result = run_on_host(tmp_path, "prefill_ring.cpp", defines)
    assert result.returncode == 0, result.stdout + result.stderr
