from __future__ import annotations

import ctypes
import threading

from services.gpu_engine.cuda.timer_slack import late_timers

PR_GET_TIMERSLACK = 30


def slack_ns() -> int:
    return ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)  # type: ignore[no-any-return]


def slack_of_a_new_thread() -> int:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(slack_ns()))
    thread.start()
    thread.join()
    return seen[0]


def test_threads_started_inside_may_wake_late_and_no_others_after_it() -> None:
    before = slack_ns(), slack_of_a_new_thread()
    with late_timers(0.25):
        assert slack_of_a_new_thread() == 250_000_000
    assert (slack_ns(), slack_of_a_new_thread()) == before


def test_the_threads_that_were_there_before_keep_theirs() -> None:
    begun, go, seen = threading.Event(), threading.Event(), []

    def look() -> None:
        begun.set()
        go.wait()
        seen.append(slack_ns())

    thread = threading.Thread(target=look)
    thread.start()
    begun.wait()
    with late_timers(0.25):
        go.set()
        thread.join()
    assert seen == [slack_ns()]
