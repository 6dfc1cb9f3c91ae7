"""The fused decode step, compiled for the host: its blocks wait for each other in threads, as on the GPU."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path

import pytest

from services.gpu_engine.cuda.fused_decode import WIDTHS
from services.gpu_engine.cuda.fused_plan import STAGE_ROWS, ProductPlan, product_plans
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.engine import Precision
from tests.gpu_engine.cuda.on_host import run_on_host
from tests.gpu_engine.models.tiny import tiny_config


@dataclass(frozen=True)
class Case:
    """A small model on so many blocks, at some of the kernel's widths and of the cache's precisions."""

    model: dict[str, int]
    blocks: int = 3
    layers: int = 2
    widths: tuple[int, ...] = WIDTHS
    kv_caches: tuple[Precision, ...] = ("bf16", "fp8")


CASES = {
    "grouped": Case({"hidden": 192, "ffn": 320, "heads": 6, "kv_heads": 2, "head_dim": 64}),
    "head size 128, odd stages": Case(
        {"hidden": 320, "ffn": 192, "heads": 2, "kv_heads": 2, "head_dim": 128}, widths=(8, 32)
    ),
    "tiles of more stages than the ring": Case(
        {"hidden": 64, "ffn": 6400, "heads": 2, "kv_heads": 1, "head_dim": 64}, widths=(8, 32), kv_caches=("bf16",)
    ),
    # At 8 rows the layers lend two rings of slots, and both warpgroups have rows of the logits: one that ran ahead of
    # the other would find its first slot's barrier in a phase that it takes for the end of its own.
    "blocks that attend, and have no weights before the logits": Case(
        {"hidden": 64, "ffn": 64, "heads": 1, "kv_heads": 1, "head_dim": 128, "vocabulary": 880},
        blocks=11,
        layers=6,
        widths=(8,),
        kv_caches=("bf16",),
    ),
}


@pytest.mark.parametrize(
    ("case", "width", "kv_cache"),
    [
        pytest.param(case, width, kv_cache, id=f"{name}-{width}-{kv_cache}")
        for name, case in CASES.items()
        for width in case.widths
        for kv_cache in case.kv_caches
    ],
)
def test_a_step_of_waiting_blocks_computes_the_model(
    tmp_path: Path, case: Case, width: int, kv_cache: Precision
) -> None:
    model = tiny_config(**{"vocabulary": 203, **case.model})
    defines = {
        name.removeprefix("BLINK_"): value for name, value in Geometry(model, kv_cache=kv_cache).defines().items()
    }
    plans = [number for plan in product_plans(model, case.blocks) for number in astuple(plan)]
    numbers = [str(number) for number in (case.blocks, case.layers, *plans)]
    result = run_on_host(tmp_path, "fused.cpp", {**defines, "SKINNY_TOKENS": width}, numbers)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("rows", [1, 16, 203, 4096, 5120, 6144, 28672, 128_256])
@pytest.mark.parametrize("depth", [64, 1088, 4096, 14336])
@pytest.mark.parametrize("blocks", [1, 3, 131])
def test_a_plan_covers_its_product_within_what_a_slot_holds(rows: int, depth: int, blocks: int) -> None:
    plan = ProductPlan.of(rows, depth, blocks, outputs=rows)
    assert plan.rows % 16 == 0
    assert plan.rows * plan.boxes <= STAGE_ROWS
    assert plan.tiles * plan.rows >= rows > (plan.tiles - 1) * plan.rows
    assert -(-plan.tiles // plan.run) <= blocks
    assert plan.stages * plan.boxes * 64 == depth
