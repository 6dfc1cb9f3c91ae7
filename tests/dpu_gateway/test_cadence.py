from __future__ import annotations

import pytest

from services.dpu_gateway.cadence import Cadence

FAST, SLOW, IDLE, LONGEST = 0.001, 0.004, 0.1, 0.04


class Worker:
    """Time and CPU time that pass as the test says."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0
        self.cadence = Cadence(
            fast=FAST, slow=SLOW, idle=IDLE, longest_gap=LONGEST, clock=lambda: self.now, cpu_clock=lambda: self.cpu
        )

    def look(self, times: int, *, found: bool = True, live: bool = True, late: bool = False, busy: float = 0) -> None:
        """Looks a millisecond apart, the event loop busy for this part of the time."""
        for _ in range(times):
            self.pass_time(0.001, busy)
            self.cadence.after_look(found=found, live=live, late=late)

    def beat(self, times: int, step: float) -> None:
        """The engine's steps, each seen at its end, and not a moment before."""
        for _ in range(times):
            self.pass_time(step)
            self.cadence.after_look(found=False, live=True, late=False)
            self.cadence.after_look(found=True, live=True, late=False)

    def pass_time(self, seconds: float, busy: float = 0) -> None:
        self.now += seconds
        self.cpu += seconds * busy


def test_looks_are_fast_until_tokens_come_and_slow_down_by_and_by_when_they_do_not() -> None:
    worker = Worker()
    worker.look(1, found=False)
    assert worker.cadence.period == FAST
    worker.look(30, found=False)
    assert worker.cadence.period == pytest.approx(0.05 * 0.031)
    worker.look(100, found=False)
    assert worker.cadence.period == SLOW


def test_after_tokens_there_is_rest_until_shortly_before_the_engines_next_step_ends() -> None:
    worker = Worker()
    worker.beat(50, 0.004)
    assert worker.cadence.period == pytest.approx(0.95 * 0.004)
    worker.pass_time(0.0038)
    worker.look(1, found=False)
    assert worker.cadence.period == FAST  # the step is longer than others


def test_one_longer_step_makes_no_later_one_seen_late() -> None:
    worker = Worker()
    worker.beat(50, 0.004)
    worker.beat(1, 0.2)
    assert worker.cadence.period <= 0.004


def test_a_shorter_step_is_expected_at_once() -> None:
    worker = Worker()
    worker.beat(50, 0.004)
    worker.beat(1, 0.002)
    assert worker.cadence.period == pytest.approx(0.95 * 0.002)


def test_a_look_that_came_late_is_followed_by_early_ones() -> None:
    """Tokens found at the first look after a rest may have been there for long."""
    worker = Worker()
    worker.beat(50, 0.004)
    worker.pass_time(0.006)  # the machine was busy
    worker.cadence.after_look(found=True, live=True, late=True)
    assert worker.cadence.period == FAST


def test_no_rest_is_long_however_long_a_step_takes() -> None:
    worker = Worker()
    worker.beat(200, 0.1)
    assert worker.cadence.period == 0.01


def test_a_request_beside_others_keeps_their_beat_and_one_alone_is_looked_for_at_once() -> None:
    worker = Worker()
    worker.beat(50, 0.004)
    worker.pass_time(0.002)
    worker.cadence.hurry()
    assert worker.cadence.period == pytest.approx(0.95 * 0.004)
    worker.pass_time(0.1)
    worker.look(1, found=False)
    assert worker.cadence.period == SLOW
    worker.cadence.hurry()
    assert worker.cadence.period == FAST
    worker.look(10, found=False)
    assert worker.cadence.period == FAST  # by the time since the request, not since the tokens before it


def test_without_requests_looks_are_rare_until_one_is_submitted() -> None:
    worker = Worker()
    worker.look(1, live=False)
    assert worker.cadence.period == IDLE
    worker.cadence.hurry()
    assert worker.cadence.period == FAST


def test_a_request_right_after_the_last_ones_end_is_looked_for_at_once() -> None:
    worker = Worker()
    worker.beat(50, 0.004)
    worker.look(1, live=False)
    worker.cadence.hurry()
    assert worker.cadence.period == FAST


def test_a_worker_that_keeps_up_never_holds_tokens_back() -> None:
    worker = Worker()
    worker.look(1000, busy=0.4)
    assert worker.cadence.gap == 0


def test_a_busy_worker_gathers_tokens_up_to_the_limit_and_stops_when_it_is_not() -> None:
    worker = Worker()
    worker.look(1000, busy=0.9)
    assert worker.cadence.gap == LONGEST
    assert worker.cadence.period == SLOW
    worker.look(1000, busy=0.4)
    assert worker.cadence.gap == LONGEST  # between the thresholds nothing changes
    worker.look(1000, busy=0.1)
    assert worker.cadence.gap == 0
    assert worker.cadence.period == FAST


def test_a_worker_that_the_machine_starves_gathers_too_although_it_uses_little_cpu() -> None:
    worker = Worker()
    worker.look(1000, late=True, busy=0.2)
    assert worker.cadence.gap == LONGEST
