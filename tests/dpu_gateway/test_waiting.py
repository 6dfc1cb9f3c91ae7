from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.dpu_gateway.waiting import Waiting
from services.ring.schema import MAX_PRIORITY, MIN_PRIORITY

SLOTS = 16
priorities = st.integers(MIN_PRIORITY, MAX_PRIORITY)


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), priorities, st.booleans()), max_size=40), priorities)
def test_the_victim_is_the_newest_of_the_lowest_priority_below_the_newcomers(
    events: list[tuple[int, int, bool]], newcomer: int
) -> None:
    waiting, expected = Waiting(SLOTS), {}
    for position, (slot, priority, arrives) in enumerate(events):
        if arrives:
            waiting.add(slot, position, priority)
            expected[slot] = (priority, -position)
        else:
            waiting.remove(slot)
            expected.pop(slot, None)
    below = {slot: key for slot, key in expected.items() if key[0] < newcomer}
    assert waiting.victim(newcomer) == (min(below, key=below.__getitem__) if below else None)
