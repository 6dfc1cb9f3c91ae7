"""How the blocks of a skinny product share its weights."""

from __future__ import annotations

import pytest

from services.gpu_engine.cuda.skinny_schedule import (
    AT_ONCE,
    HALF_RING,
    HELD_STAGES,
    MOST_SHARED_BYTES,
    PREFETCHED_BYTES,
    ROW_BYTES,
    SLICE_ROWS,
    TILE_ROWS,
    WIDTHS,
    Schedule,
    schedule_of,
)

LLAMA_3_8B = {"qkv": 6144, "output and down": 4096, "gate and up": 28672, "logits": 128256}


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 113, 131, 147])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("weight_rows", [8, 200, 576, 960, 4096, 6144, 28672, 128256, 151936])
def test_a_schedule_covers_the_weight_with_blocks_that_run_at_once(
    weight_rows: int, width: int, multiprocessors: int
) -> None:
    schedule = schedule_of(weight_rows, width, multiprocessors)
    blocks = schedule.blocks(weight_rows)
    assert schedule.rows in TILE_ROWS
    assert blocks * schedule.run * schedule.rows >= weight_rows
    assert blocks <= multiprocessors
    assert blocks % schedule.cluster == 0
    assert width % (schedule.cluster * SLICE_ROWS) == 0
    assert schedule.stages(width) > HELD_STAGES
    assert schedule.early == AT_ONCE


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("weight_rows", LLAMA_3_8B.values(), ids=LLAMA_3_8B)
def test_llama_3_8b_leaves_less_than_a_twentieth_of_the_blocks_rows_empty(weight_rows: int, width: int) -> None:
    schedule = schedule_of(weight_rows, width, 131)
    covered = schedule.blocks(weight_rows) * schedule.run * schedule.rows
    assert covered < 1.05 * weight_rows


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", TILE_ROWS)
def test_shared_memory_suffices_for_one_block_or_two_by_the_ring(rows: int, width: int) -> None:
    whole, half = Schedule(rows, 1), Schedule(rows, 1, ring=HALF_RING)
    assert whole.shared_bytes(width) <= MOST_SHARED_BYTES
    assert 2 * (half.shared_bytes(width) + 2048) <= 228 << 10  # a multiprocessor's; the ring's alignment, the system's
    assert half.stages(width) > HELD_STAGES


def test_a_ring_that_would_stand_still_is_refused() -> None:
    assert Schedule(128, 1, ring=48 << 10).stages(64) == HELD_STAGES
    with pytest.raises(ValueError, match="ring of 1 stages of 24576 bytes, must be 2"):
        Schedule(128, 1, ring=(48 << 10) - 1).stages(64)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("weight_rows", LLAMA_3_8B.values(), ids=LLAMA_3_8B)
def test_all_blocks_together_prefetch_a_bounded_number_of_bytes(weight_rows: int, width: int) -> None:
    schedule = schedule_of(weight_rows, width, 131)
    prefetched = schedule.blocks(weight_rows) * schedule.prefetched * schedule.rows * ROW_BYTES
    assert PREFETCHED_BYTES // 2 < prefetched <= PREFETCHED_BYTES
