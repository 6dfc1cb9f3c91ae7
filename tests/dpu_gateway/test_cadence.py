from __future__ import annotations

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
            self.now += 0.001
            self.cpu += 0.001 * busy
            self.cadence.after_look(found=found, live=live, late=late)


def test_looks_are_fast_while_tokens_flow_and_slow_down_by_and_by() -> None:
    worker = Worker()
    worker.look(1)
    assert worker.cadence.period == FAST
    periods = []
    for _ in range(5):
        worker.look(1, found=False)
        periods.append(worker.cadence.period)
    assert periods == sorted(periods)
    assert periods[0] > FAST
    assert periods[-1] == SLOW
    worker.look(1)
    assert worker.cadence.period == FAST


def test_without_requests_looks_are_rare_until_one_is_submitted() -> None:
    worker = Worker()
    worker.look(1, live=False)
    assert worker.cadence.period == IDLE
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
