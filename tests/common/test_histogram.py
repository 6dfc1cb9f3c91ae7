"""Against Prometheus's own rules."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.common.histogram import increase, quantile

INF = float("inf")
BOUNDS = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, INF)


def test_a_quantile_is_linear_within_its_bucket() -> None:
    buckets = {0.1: 10.0, 0.2: 30.0, INF: 40.0}
    assert quantile(buckets, 0.25) == pytest.approx(0.1)
    assert quantile(buckets, 0.5) == pytest.approx(0.15)
    assert quantile(buckets, 0.99) == pytest.approx(0.2)


@example([0.0078125, 1.0], 0.5)  # 0.001 + (0.01 - 0.001) is more than 0.01
@given(st.lists(st.floats(0.0005, 150), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    buckets = {bound: float(sum(value <= bound for value in values)) for bound in BOUNDS}
    exact = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    upper = next(bound for bound in BOUNDS if exact <= bound)
    lower = max((bound for bound in BOUNDS if bound < exact), default=0.0)
    found = quantile(buckets, share)
    assert found is not None
    assert lower <= found <= upper


def test_beyond_the_last_bound_it_is_that_bound_and_of_nothing_it_is_none() -> None:
    assert quantile({1.0: 0, INF: 5}, 0.99) == 1.0
    assert quantile({1.0: 0, INF: 0}, 0.99) is None
    assert quantile({}, 0.99) is None


def test_a_counter_that_went_back_was_begun_anew() -> None:
    assert increase({1.0: 5, INF: 9}, {1.0: 7, INF: 12}) == {1.0: 2, INF: 3}
    assert increase({1.0: 5, INF: 9}, {1.0: 1, INF: 2}) == {1.0: 1, INF: 2}
