"""The core's memory can be pinned as a whole: whole pages, with the step's arrays in it."""

from __future__ import annotations

from tests.gpu_engine.core.machine import Machine


def test_the_memory_is_whole_pages_that_hold_the_steps_arrays() -> None:
    scheduler = Machine().scheduler
    memory, step = scheduler.memory, scheduler.step
    begin = memory.ctypes.data
    assert begin % 4096 == memory.nbytes % 4096 == 0
    for array in (step.token_ids, step.row_start, step.page_table, step.sampling, step.history):
        assert begin <= array.ctypes.data
        assert array.ctypes.data + array.nbytes <= begin + memory.nbytes


def test_the_memory_outlives_its_scheduler() -> None:
    memory = Machine().scheduler.memory
    assert memory.sum() > 0
