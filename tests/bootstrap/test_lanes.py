from __future__ import annotations

import pytest

from services.bootstrap.errors import NoFreeLaneError
from services.bootstrap.lanes import LaneTable
from services.ring.schema import LanePhase

FREE, ATTACHED = LanePhase.FREE, LanePhase.ATTACHED


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> LaneTable:
    return LaneTable(lanes=2, promise_seconds=10, clock=clock)


def test_each_gateway_gets_a_lane_of_its_own(table: LaneTable) -> None:
    first = table.grant("a", [FREE, FREE])
    second = table.grant("b", [FREE, FREE])  # a has not attached yet: its lane is promised
    assert {first.lane, second.lane} == {0, 1}


def test_a_gateway_gets_its_lane_back_at_once_under_a_new_epoch(table: LaneTable) -> None:
    first = table.grant("a", [FREE, FREE])
    again = table.grant("a", [ATTACHED, FREE])
    assert again.lane == first.lane
    assert again.gateway_epoch > first.gateway_epoch


def test_a_full_ring_refuses_naming_the_number_of_lanes(table: LaneTable, clock: Clock) -> None:
    table.grant("a", [FREE, FREE])
    table.grant("b", [FREE, FREE])
    clock.now += 60
    with pytest.raises(NoFreeLaneError, match="all 2 lanes"):
        table.grant("c", [ATTACHED, ATTACHED])


def test_a_lane_whose_lease_ran_out_is_used_again(table: LaneTable, clock: Clock) -> None:
    a = table.grant("a", [FREE, FREE])
    table.grant("b", [FREE, FREE])
    clock.now += 60
    assert table.grant("c", [FREE, ATTACHED]).lane == a.lane
    with pytest.raises(NoFreeLaneError):  # a lost its lane to c
        table.grant("a", [ATTACHED, ATTACHED])


def test_a_promise_that_was_not_taken_up_lapses(table: LaneTable, clock: Clock) -> None:
    table.grant("a", [FREE, FREE])
    table.grant("b", [FREE, FREE])
    with pytest.raises(NoFreeLaneError):
        table.grant("c", [FREE, FREE])
    clock.now += 10
    table.grant("c", [FREE, FREE])


def test_the_lane_whose_owner_is_gone_longest_goes_first(table: LaneTable, clock: Clock) -> None:
    table.grant("a", [FREE, FREE])
    clock.now += 1
    b = table.grant("b", [FREE, FREE])
    clock.now += 60
    table.grant("a", [FREE, FREE])
    clock.now += 10
    assert table.grant("c", [FREE, FREE]).lane == b.lane


def test_an_unused_lane_goes_before_one_that_somebody_may_come_back_to(table: LaneTable, clock: Clock) -> None:
    a = table.grant("a", [FREE, FREE])
    clock.now += 60
    assert table.grant("b", [FREE, FREE]).lane != a.lane


def test_epochs_grow_over_restarts_of_bootstrap() -> None:
    before = LaneTable(1, 10).grant("a", [FREE])
    after = LaneTable(1, 10).grant("a", [FREE])
    assert after.gateway_epoch > before.gateway_epoch > 0


def test_a_certificate_holds_no_more_lanes_than_it_may_under_however_many_ids(clock: Clock) -> None:
    table = LaneTable(4, 10, clock, per_certificate=2)
    phases = [FREE] * 4
    mine = [table.grant(("dpu-a", number), phases, "dpu-a").lane for number in range(2)]
    words = "certificate 'dpu-a' holds 2 lanes, and lanes_per_certificate is 2"
    with pytest.raises(NoFreeLaneError, match=words):
        table.grant(("dpu-a", 2), phases, "dpu-a")
    assert table.grant(("dpu-b", 0), phases, "dpu-b").lane not in mine
    assert table.grant(("dpu-a", 1), phases, "dpu-a").lane == mine[1]  # its own again, as ever
    clock.now += 60
    phases[mine[0]] = ATTACHED
    assert table.grant(("dpu-a", 2), phases, "dpu-a").lane not in {mine[0]}  # the other promise has lapsed
    with pytest.raises(NoFreeLaneError, match=words):
        table.grant(("dpu-a", 3), phases, "dpu-a")


def test_callers_of_the_unix_socket_have_no_such_limit(clock: Clock) -> None:
    table = LaneTable(4, 10, clock, per_certificate=1)
    assert {table.grant(number, [FREE] * 4).lane for number in range(4)} == {0, 1, 2, 3}
