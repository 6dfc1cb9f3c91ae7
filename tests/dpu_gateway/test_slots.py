from __future__ import annotations

import asyncio

import numpy as np

from services.dpu_gateway.slots import SlotTracker
from services.ring.schema import FinishReason, SlotPhase, slot_status_word


class Statuses:
    """The lane's slot statuses, and how often they were read."""

    def __init__(self, slots: int) -> None:
        self.words = np.zeros(slots, np.uint64)
        self.reads = 0

    async def __call__(self) -> np.ndarray:
        self.reads += 1
        words = self.words.copy()
        await asyncio.sleep(0)  # under way
        return words

    def set(self, slot: int, tag: int, phase: SlotPhase) -> None:
        self.words[slot] = slot_status_word(tag, phase, FinishReason.STOP)


async def test_every_slot_is_handed_out_once_and_then_none() -> None:
    statuses = Statuses(8)
    tracker = SlotTracker(8, statuses)
    assert sorted([await tracker.take() or 0 for _ in range(8)]) == list(range(8))
    assert await tracker.take() is None
    assert tracker.available == 0
    assert statuses.reads == 0


async def test_an_ended_slot_is_reused_only_once_the_engine_let_go_of_that_very_submission() -> None:
    statuses = Statuses(1)
    tracker = SlotTracker(1, statuses)
    assert await tracker.take() == 0
    tracker.ended(0, tag=7)
    statuses.set(0, tag=6, phase=SlotPhase.FREE)  # what is left of the submission before
    assert await tracker.take() is None
    statuses.set(0, tag=7, phase=SlotPhase.RUNNING)
    assert await tracker.take() is None
    statuses.set(0, tag=7, phase=SlotPhase.FREE)
    assert await tracker.take() == 0


async def test_one_bulk_read_serves_all_slots_that_ended_meanwhile() -> None:
    statuses = Statuses(64)
    tracker = SlotTracker(64, statuses)
    tag = 0
    for _ in range(10):
        for _ in range(64):
            slot = await tracker.take()
            assert slot is not None
            tag += 1
            statuses.set(slot, tag, SlotPhase.FREE)
            tracker.ended(slot, tag)
    assert statuses.reads == 9


async def test_a_slot_given_back_unused_needs_no_word_from_the_engine() -> None:
    statuses = Statuses(1)
    tracker = SlotTracker(1, statuses)
    tracker.untake(await tracker.take() or 0)
    assert await tracker.take() == 0
    assert statuses.reads == 0


async def test_requests_that_come_while_the_statuses_are_read_wait_for_the_same_read() -> None:
    statuses = Statuses(8)
    tracker = SlotTracker(8, statuses)
    for tag in range(1, 9):
        slot = await tracker.take()
        assert slot is not None
        statuses.set(slot, tag, SlotPhase.FREE if tag > 2 else SlotPhase.RUNNING)
        tracker.ended(slot, tag)
    taken = await asyncio.gather(*(tracker.take() for _ in range(6)))
    assert sorted(slot or 0 for slot in taken) == [2, 3, 4, 5, 6, 7]  # 0 and 1 are still running
    assert statuses.reads == 1
    assert await tracker.take() is None
    assert tracker.available == 2


async def test_a_read_that_fails_or_is_given_up_loses_no_slot() -> None:
    statuses = Statuses(1)
    tracker = SlotTracker(1, statuses)
    tracker.ended(await tracker.take() or 0, tag=7)
    waiting = asyncio.create_task(tracker.take())
    second = asyncio.create_task(tracker.take())
    await asyncio.sleep(0)
    waiting.cancel()
    statuses.set(0, tag=7, phase=SlotPhase.FREE)
    assert await second == 0
    assert waiting.cancelled()
