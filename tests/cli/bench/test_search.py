"""The search for the highest serviceable rate."""

from __future__ import annotations

import pytest

from services.cli.bench.search import highest_rate


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.7, 100.0])
def test_it_comes_within_its_precision_of_the_truth_from_below(limit: float) -> None:
    asked: list[float] = []

    def serves(rate: float) -> bool:
        asked.append(rate)
        return rate <= limit

    found = highest_rate(serves, 4.0, 0.05)
    assert found is not None
    assert limit * 0.94 <= found <= limit
    assert len(asked) < 15
    assert len(set(asked)) == len(asked)


def test_a_server_that_serves_nothing_has_no_such_rate() -> None:
    assert highest_rate(lambda _: False, 4.0, 0.05) is None
