"""The fused decode step, compiled for the host: its blocks wait for each other in threads, as on the GPU."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from services.gpu_engine.cuda.fused_plan import ProductPlan
from tests.gpu_engine.cuda.on_host import run_on_host

BLOCKS, VOCABULARY = 3, 203
SHAPES = {
    "grouped": {"HIDDEN": 192, "FFN": 320, "HEADS": 6, "KV_HEADS": 2, "HEAD_DIM": 64, "ROTARY_DIM": 64},
    "head size 128, odd depths": {
        "HIDDEN": 136,
        "FFN": 72,
        "HEADS": 2,
        "KV_HEADS": 2,
        "HEAD_DIM": 128,
        "ROTARY_DIM": 128,
    },
}


@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_step_of_waiting_blocks_computes_the_model(tmp_path: Path, shape: dict[str, int], width: int) -> None:
    hidden, ffn, query = shape["HIDDEN"], shape["FFN"], shape["HEADS"] * shape["HEAD_DIM"]
    fused = query + 2 * shape["KV_HEADS"] * shape["HEAD_DIM"]
    products = (
        (fused, hidden, fused),
        (hidden, query, hidden),
        (2 * ffn, hidden, ffn),
        (hidden, ffn, hidden),
        (VOCABULARY, hidden, VOCABULARY),
    )
    plans = [ProductPlan.of(rows, depth, BLOCKS, outputs=outputs) for rows, depth, outputs in products]
    numbers = [str(number) for plan in plans for number in astuple(plan)]
    defines = {**shape, "PAGE_SIZE": 16, "SKINNY_TOKENS": width}
    result = run_on_host(tmp_path, "fused.cpp", defines, numbers)
    assert result.returncode == 0, result.stdout + result.stderr
