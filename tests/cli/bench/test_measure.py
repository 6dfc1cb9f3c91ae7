"""Figures of a load from what its requests saw: percentiles, intervals, goodput, CPU time and energy a token."""

from __future__ import annotations

import numpy as np
import pytest

from services.cli.bench.generator import Share
from services.cli.bench.measure import Repeat, summarize
from services.cli.bench.outcome import Outcome
from services.cli.bench.report import Slo
from services.cli.bench.statistics import interval, t_quantile


def outcome(at: float, ttft: float, gap: float, tokens: int = 11, error: str = "") -> Outcome:
    arrivals = [at + ttft + gap * index for index in range(tokens)]
    return Outcome(at, at, arrivals[-1], arrivals, prompt_tokens=3, output_tokens=tokens, error=error)


def repeat(outcomes: list[Outcome], cpu: float | None = None, joules: float | None = None) -> Repeat:
    return Repeat([Share(outcomes, [0.0], 0.1, 1.0)], cpu, joules)


def test_percentiles_are_of_all_requests_in_milliseconds() -> None:
    times = np.arange(1, 1001) / 1000
    point = summarize(
        10.0, [repeat([outcome(index, float(ttft), 0.02) for index, ttft in enumerate(times)])], None, 1, None
    )
    assert point.ttft_ms is not None
    assert point.tpot_ms is not None
    assert point.itl_ms is not None
    assert point.end_to_end_ms is not None
    seen = [getattr(point.ttft_ms, name).mean for name in ("p50", "p95", "p99", "p999")]
    assert seen == pytest.approx([500.5, 950.05, 990.01, 999.001])
    assert (point.ttft_ms.samples, point.itl_ms.samples) == (1000, 10_000)
    assert point.tpot_ms.p999.mean == pytest.approx(20)
    assert point.itl_ms.p50.mean == pytest.approx(20)
    assert point.end_to_end_ms.p50.mean == pytest.approx(700.5)
    assert (point.ttft_ms.p50.low, point.ttft_ms.p50.high) == (None, None)  # one repeat says nothing of its spread


def test_a_single_token_has_no_time_per_output_token() -> None:
    point = summarize(1.0, [repeat([outcome(0, 0.1, 0.0, tokens=1), outcome(1, 0.1, 0.0, tokens=1)])], None, 1, None)
    assert (point.tpot_ms, point.itl_ms) == (None, None)
    assert point.ttft_ms is not None


def test_goodput_counts_requests_that_keep_both_limits_and_failures_break_them() -> None:
    outcomes = [
        outcome(0, 0.10, 0.02),
        outcome(1, 0.30, 0.02),  # first token too late
        outcome(2, 0.10, 0.05),  # tokens too slow
        outcome(3, 0.10, 0.02, error="HTTP 500"),
        outcome(9.7, 0.10, 0.02),  # ends at 10
    ]
    point = summarize(1.0, [repeat(outcomes)], Slo(ttft_ms=200, tpot_ms=30), 1, None)
    assert point.goodput_requests_per_s is not None
    assert point.slo_share is not None
    assert point.goodput_requests_per_s.mean == pytest.approx(2 / 10)
    assert point.slo_share.mean == pytest.approx(2 / 5)
    assert point.requests_per_s.mean == pytest.approx(4 / 10)
    assert point.failed == {"HTTP 500": 1}
    only_first = summarize(1.0, [repeat(outcomes)], Slo(ttft_ms=200, tpot_ms=None), 1, None).slo_share
    assert only_first is not None
    assert only_first.mean == pytest.approx(3 / 5)


def test_cpu_time_and_energy_are_for_each_output_token_and_intervals_over_repeats() -> None:
    repeats = [repeat([outcome(0, 0.1, 0.02, tokens=100)], cpu, 50.0) for cpu in (0.01, 0.02, 0.03)]
    point = summarize(1.0, repeats, None, 1, None)
    assert point.host_cpu_us_per_token is not None
    assert point.gpu_joules_per_token is not None
    assert point.host_cpu_us_per_token.mean == pytest.approx(200)
    assert point.host_cpu_us_per_token.high == pytest.approx(200 + 4.302653 * 100 / 3**0.5, rel=1e-5)
    assert point.gpu_joules_per_token.mean == point.gpu_joules_per_token.low == pytest.approx(0.5)
    assert summarize(1.0, [repeat([outcome(0, 0.1, 0.02)])], None, 1, None).gpu_joules_per_token is None


# scipy.stats.t.ppf(0.975, freedom)
@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706205), (2, 4.302653), (3, 3.182446), (9, 2.262157), (30, 2.042272)]
)
def test_quantiles_of_students_t(freedom: int, t: float) -> None:
    assert t_quantile(0.95, freedom) == pytest.approx(t, abs=1e-5)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(5)
    intervals = [interval(rng.normal(3.0, 2.0, 4).tolist()) for _ in range(2000)]
    held = sum(low <= 3.0 <= high for low, high in filter(None, intervals))
    assert 0.93 <= held / 2000 <= 0.97
