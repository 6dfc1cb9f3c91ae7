"""How the fastest way is found, with given times in place of the GPU's."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra blink[cuda]")

from services.gpu_engine.cuda.products import NEAR, SAMPLES, fastest


class Times:
    """Each look takes the way's next time, the last one again and again."""

    def __init__(self, **ways: list[float]) -> None:
        self.ways = ways
        self.looks: Counter[str] = Counter()

    def __call__(self, way: str) -> float:
        self.looks[way] += 1
        times = self.ways[way]
        return times[min(self.looks[way], len(times)) - 1]


def test_the_fastest_wins_wherever_it_stands() -> None:
    for ways in (["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"]):
        assert fastest(ways, Times(a=[3.0], b=[1.0], c=[2.0])) == "b"


def test_one_lucky_look_does_not_win() -> None:
    assert fastest(["lucky", "steady"], Times(lucky=[1.0, 1.3, 1.3], steady=[1.05])) == "steady"


def test_what_is_far_behind_is_looked_at_once() -> None:
    times = Times(slow=[2.0 * NEAR], near=[1.05], fast=[1.0])
    assert fastest(["slow", "near", "fast"], times) == "fast"
    assert times.looks == {"slow": 1, "near": SAMPLES, "fast": SAMPLES}


def test_a_lone_way_is_looked_at_once() -> None:
    times = Times(only=[1.0])
    assert fastest(["only"], times) == "only"
    assert times.looks == {"only": 1}
