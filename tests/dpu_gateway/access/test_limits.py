from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dpu_gateway.access.keys import MAX_KEYS, Key
from services.dpu_gateway.access.limits import BURST_SECONDS, SETTLED_TOKENS, Limits
from services.dpu_gateway.errors import Overload, OverloadedError


def key(number: int = 1, rate: float | None = None, concurrent: int | None = None, tokens: float | None = None) -> Key:
    return Key(f"key-{number}", number.to_bytes(32, "big")[::-1], rate, concurrent, tokens)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limits(path: Path, clock: Clock, worker: int = 0) -> Limits:
    return Limits(path / "limits", worker, 0.5, clock)


def test_requests_under_way_are_counted_over_all_workers(tmp_path: Path, clock: Clock) -> None:
    first, second = limits(tmp_path, clock, 0), limits(tmp_path, clock, 1)
    limited = key(concurrent=3)
    with ExitStack() as under_way:
        for worker in (first, first, second):
            under_way.enter_context(worker.admitted(limited))
        for worker in (first, second):
            with pytest.raises(OverloadedError, match="3 requests of key-1 are under way, at most 3") as refusal:
                worker.admitted(limited).__enter__()
            assert (refusal.value.cause, refusal.value.retry_after) == (Overload.CONCURRENCY_LIMIT, 0.5)
        with first.admitted(key(2, concurrent=1)):
            pass
    with first.admitted(limited):
        pass


def test_a_killed_workers_requests_are_forgotten_when_it_comes_back(tmp_path: Path, clock: Clock) -> None:
    other = limits(tmp_path, clock, 1)
    limits(tmp_path, clock, 0)._enter(key(concurrent=1))  # and never leaves
    with pytest.raises(OverloadedError):
        other.admitted(key(concurrent=1)).__enter__()
    limits(tmp_path, clock, 0)
    with other.admitted(key(concurrent=1)):
        pass


def test_a_rate_is_shared_by_workers_and_the_refusal_says_when_the_next_may_come(tmp_path: Path, clock: Clock) -> None:
    workers = [limits(tmp_path, clock, number) for number in range(2)]
    limited = key(rate=60)
    for turn in range(int(BURST_SECONDS)):
        with workers[turn % 2].admitted(limited):
            pass
    with pytest.raises(OverloadedError, match="key-1 may send 60 requests a minute") as refusal:
        workers[0].admitted(limited).__enter__()
    assert refusal.value.cause is Overload.RATE_LIMIT
    assert refusal.value.retry_after == pytest.approx(1.0)
    clock.now += refusal.value.retry_after
    with workers[1].admitted(limited):
        pass
    with pytest.raises(OverloadedError):
        workers[0].admitted(limited).__enter__()


@given(
    rate=st.floats(1, 6000),
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=60),
)
def test_no_span_of_time_admits_more_than_rate_and_burst(
    tmp_path_factory: pytest.TempPathFactory, rate: float, gaps: list[float]
) -> None:
    clock = Clock()
    account = limits(tmp_path_factory.mktemp("limits"), clock)
    admitted, waits = [], []
    for gap in gaps:
        clock.now += gap
        try:
            with account.admitted(key(rate=rate)):
                admitted.append(clock.now)
        except OverloadedError as refusal:
            waits.append(refusal.retry_after)
    account.close()
    assert all(0 < wait <= 60 / rate + 1e-6 for wait in waits)
    burst = max(1.0, rate / 60 * BURST_SECONDS)
    for first in range(len(admitted)):
        for last in range(first, len(admitted)):
            assert last - first + 1 <= burst + (admitted[last] - admitted[first]) * rate / 60 + 1e-6


def test_a_refused_request_uses_nothing_up(tmp_path: Path, clock: Clock) -> None:
    account = limits(tmp_path, clock)
    limited = key(rate=6, concurrent=1)
    with account.admitted(limited):
        for _ in range(5):
            with pytest.raises(OverloadedError, match="under way"):
                account.admitted(limited).__enter__()
    clock.now += 10
    with account.admitted(limited):
        pass


def test_tokens_are_paid_for_afterwards_and_debt_waits_for_the_rate(tmp_path: Path, clock: Clock) -> None:
    workers = [limits(tmp_path, clock, number) for number in range(2)]
    limited = key(tokens=600)  # ten a second, a hundred at once
    with workers[0].admitted(limited) as meter:
        meter.use(130)
    with pytest.raises(OverloadedError, match="key-1 may use 600 tokens a minute") as refusal:
        workers[1].admitted(limited).__enter__()
    assert refusal.value.cause is Overload.TOKEN_RATE_LIMIT
    assert refusal.value.retry_after == pytest.approx(3.1)
    clock.now += refusal.value.retry_after
    with workers[1].admitted(limited):
        pass


def test_a_long_stream_is_charged_while_it_runs(tmp_path: Path, clock: Clock) -> None:
    account = limits(tmp_path, clock)
    limited = key(tokens=60)
    with account.admitted(limited) as meter:
        for _ in range(SETTLED_TOKENS):
            meter.use(1)
        with pytest.raises(OverloadedError, match="tokens a minute"):
            account.admitted(limited).__enter__()


def test_a_request_that_fails_is_charged_for_what_it_used(tmp_path: Path, clock: Clock) -> None:
    account = limits(tmp_path, clock)
    limited = key(tokens=600)

    def fail() -> None:
        with account.admitted(limited) as meter:
            meter.use(40)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert account.allowances(limited)["tokens"].remaining == 60


def test_allowances_say_what_is_left_and_when_all_is_back(tmp_path: Path, clock: Clock) -> None:
    account = limits(tmp_path, clock)
    limited = key(rate=60, tokens=600)
    with account.admitted(limited) as meter:
        meter.use(50)
    left = account.allowances(limited)
    assert (left["requests"].per_minute, left["requests"].remaining, left["requests"].full_after) == (60, 9, 1)
    assert (left["tokens"].per_minute, left["tokens"].remaining, left["tokens"].full_after) == (600, 50, 5)
    assert account.allowances(key(2)) == {}


@given(
    rate=st.floats(60, 60_000),
    requests=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 500)), min_size=1, max_size=60),
)
def test_tokens_pass_the_rate_by_no_more_than_the_burst_and_one_request(
    tmp_path_factory: pytest.TempPathFactory, rate: float, requests: list[tuple[float, int]]
) -> None:
    clock = Clock()
    account = limits(tmp_path_factory.mktemp("limits"), clock)
    used, waits = 0, []
    for gap, tokens in requests:
        clock.now += gap
        try:
            with account.admitted(key(tokens=rate)) as meter:
                meter.use(tokens)
                used += tokens
        except OverloadedError as refusal:
            waits.append(refusal.retry_after)
    account.close()
    assert all(0 < wait <= 501 * 60 / rate for wait in waits)
    seconds = sum(gap for gap, _ in requests)
    assert used <= max(1.0, rate / 60 * BURST_SECONDS) + seconds * rate / 60 + 500


def test_keys_that_are_gone_make_room_for_new_ones(tmp_path: Path, clock: Clock) -> None:
    account = limits(tmp_path, clock)
    held = account.admitted(key(1, concurrent=1))
    held.__enter__()
    for number in range(2, 2 * MAX_KEYS):
        clock.now += 1
        with account.admitted(key(number, rate=1, concurrent=1)):
            pass
    with pytest.raises(OverloadedError):
        account.admitted(key(1, concurrent=1)).__enter__()
    held.__exit__(None, None, None)


def test_processes_do_not_lose_each_others_requests(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from services.dpu_gateway.access.keys import Key
from services.dpu_gateway.access.limits import Limits
from services.dpu_gateway.errors import OverloadedError

account = Limits(Path(sys.argv[1]), int(sys.argv[2]), 0.5, clock=lambda: 1.0)
key, admitted = Key("k", bytes(range(32)), 60 * 200.0), 0
for _ in range(1000):
    try:
        with account.admitted(key):
            admitted += 1
    except OverloadedError:
        pass
print(admitted)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "limits")]
    running = [subprocess.Popen([*command, str(worker)], stdout=subprocess.PIPE) for worker in range(3)]
    admitted = [int(process.communicate()[0]) for process in running]
    assert sum(admitted) == 200 * BURST_SECONDS


def test_a_file_from_before_the_machines_restart_takes_nothing_away(tmp_path: Path, clock: Clock) -> None:
    limited = key(rate=60, tokens=600)
    with limits(tmp_path, clock).admitted(limited) as meter:
        meter.use(40)
    clock.now = 3.0
    again = limits(tmp_path, clock)
    assert again.allowances(limited)["tokens"].remaining == 60
    with again.admitted(limited):
        pass
    clock.now += BURST_SECONDS
    assert again.allowances(limited)["tokens"].remaining == 600 / 60 * BURST_SECONDS
