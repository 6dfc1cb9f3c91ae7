from __future__ import annotations

import numpy as np

from services.dpu_gateway.slots import SlotTracker
from services.ring.schema import FinishReason, SlotPhase, slot_status_word


class Statuses:
    """The lane's slot statuses, and how often they were read."""

    def __init__(self, slots: int) -> None:
        self.words = np.zeros(slots, np.uint64)
        self.reads = 0

    def __call__(self) -> np.ndarray:
        self.reads += 1
        return self.words.copy()

    def set(self, slot: int, tag: int, phase: SlotPhase) -> None:
        self.words[slot] = slot_status_word(tag, phase, FinishReason.STOP)


def test_every_slot_is_handed_out_once_and_then_none() -> None:
    statuses = Statuses(8)
    tracker = SlotTracker(8, statuses)
    assert sorted(tracker.take() for _ in range(8)) == list(range(8))  # type: ignore[type-var]
    assert tracker.take() is None
    assert tracker.available == 0
    assert statuses.reads == 0


def test_an_ended_slot_is_reused_only_once_the_engine_let_go_of_that_very_submission() -> None:
    statuses = Statuses(1)
    tracker = SlotTracker(1, statuses)
    assert tracker.take() == 0
    tracker.ended(0, tag=7)
    statuses.set(0, tag=6, phase=SlotPhase.FREE)  # what is left of the submission before
    assert tracker.take() is None
    statuses.set(0, tag=7, phase=SlotPhase.RUNNING)
    assert tracker.take() is None
    statuses.set(0, tag=7, phase=SlotPhase.FREE)
    assert tracker.take() == 0


def test_one_bulk_read_serves_all_slots_that_ended_meanwhile() -> None:
    statuses = Statuses(64)
    tracker = SlotTracker(64, statuses)
    tag = 0
    for _ in range(10):
        for _ in range(64):
            slot = tracker.take()
            assert slot is not None
            tag += 1
            statuses.set(slot, tag, SlotPhase.FREE)
            tracker.ended(slot, tag)
    assert statuses.reads == 9


def test_a_slot_given_back_unused_needs_no_word_from_the_engine() -> None:
    statuses = Statuses(1)
    tracker = SlotTracker(1, statuses)
    tracker.untake(tracker.take() or 0)
    assert tracker.take() == 0
    assert statuses.reads == 0
