"""How the blocks of a skinny product share its weights."""

from __future__ import annotations

import pytest

from services.gpu_engine.cuda.skinny_schedule import (
    FEW_ROWS,
    HELD_STAGES,
    MOST_SHARED_BYTES,
    TILE_ROWS,
    WIDTHS,
    Schedule,
    schedules,
)

LLAMA_3_8B = {"qkv": 6144, "output and down": 4096, "gate and up": 28672, "logits": 128256}


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 113, 131, 147])
@pytest.mark.parametrize("weight_rows", [8, 200, 576, 960, 4096, 6144, 28672, 128256, 151936])
def test_every_schedule_covers_the_weight_with_blocks_that_run_at_once(weight_rows: int, multiprocessors: int) -> None:
    found = schedules(weight_rows, multiprocessors)
    assert {schedule.rows for schedule in found} == set(TILE_ROWS)
    for schedule in found:
        blocks = schedule.blocks(weight_rows)
        assert blocks <= multiprocessors
        assert blocks * schedule.run * schedule.rows >= weight_rows
        assert (blocks - 1) * schedule.run * schedule.rows < weight_rows, "a block has nothing to do"


@pytest.mark.parametrize("weight_rows", LLAMA_3_8B.values(), ids=LLAMA_3_8B)
def test_the_first_for_llama_3_8b_leaves_less_than_a_twentieth_of_the_blocks_rows_empty(weight_rows: int) -> None:
    first = schedules(weight_rows, 131)[0]
    assert first.rows >= FEW_ROWS
    assert first.blocks(weight_rows) * first.run * first.rows < 1.05 * weight_rows


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", TILE_ROWS)
def test_a_block_fits_its_multiprocessor(rows: int, width: int) -> None:
    schedule = Schedule(rows, 1)
    assert schedule.shared_bytes(width) <= MOST_SHARED_BYTES
    assert schedule.stages(width) > HELD_STAGES


def test_a_ring_that_would_stand_still_is_refused() -> None:
    assert Schedule(128, 1, ring=48 << 10).stages(64) == HELD_STAGES
    with pytest.raises(ValueError, match="ring of 1 stages of 24576 bytes, must be 2"):
        Schedule(128, 1, ring=(48 << 10) - 1).stages(64)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("weight_rows", LLAMA_3_8B.values())
def test_two_products_never_share_a_multiprocessor(weight_rows: int, width: int) -> None:
    """Where launches overlap, a second block's room would let a product crowd on half of them (decision 0011)."""
    multiprocessor, of_a_block = 228 << 10, 1 << 10  # shared memory of an H200's, and what CUDA takes of it for a block
    for schedule in schedules(weight_rows, 131):
        assert 2 * (schedule.shared_bytes(width) + of_a_block) > multiprocessor
