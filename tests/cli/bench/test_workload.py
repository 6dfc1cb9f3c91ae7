"""Arrivals, lengths and traces are what they are said to be."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from services.cli.bench.arrivals import arrival_times
from services.cli.bench.kinds import Arrivals
from services.cli.bench.lengths import SHAREGPT_OUTPUT, SHAREGPT_PROMPT, LogNormal, Uniform, parse_lengths
from services.cli.bench.workload import Synthetic, Trace
from services.cli.errors import CommandError

NEGATIVE = '{"timestamp": -1, "input_length": 1, "output_length": 1}'


@pytest.mark.parametrize(
    ("kind", "variation"), [(Arrivals.CONSTANT, 0.0), (Arrivals.POISSON, 1.0), (Arrivals.BURSTY, 2.0)]
)
def test_arrivals_have_their_rate_and_their_gaps_variation(kind: Arrivals, variation: float) -> None:
    times = arrival_times(kind, 50.0, 400.0, np.random.default_rng(1), shape=0.25)
    gaps = np.diff(times)
    assert times[0] >= 0
    assert times[-1] < 400
    assert (gaps >= 0).all()
    assert times.size / 400 == pytest.approx(50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05, abs=1e-9)


def test_lengths_have_their_medians_and_bounds() -> None:
    rng = np.random.default_rng(2)
    assert set(parse_lengths("128", SHAREGPT_PROMPT).draw(9, rng).tolist()) == {128}
    assert set(parse_lengths("uniform:3:5", SHAREGPT_PROMPT).draw(99, rng).tolist()) == {3, 4, 5}
    drawn = parse_lengths("lognormal:5.5:0.75:20:1000", SHAREGPT_PROMPT).draw(20_000, rng)
    assert np.median(drawn) == pytest.approx(math.exp(5.5), rel=0.03)
    assert (drawn.min(), drawn.max()) == (20, 1000)


def test_sharegpt_lengths_have_the_published_means_before_they_are_cut() -> None:
    for lengths, mean in ((SHAREGPT_PROMPT, 161.3), (SHAREGPT_OUTPUT, 338.0)):
        assert math.exp(lengths.mu + lengths.sigma**2 / 2) == pytest.approx(mean, rel=0.02)
    assert parse_lengths("sharegpt", SHAREGPT_OUTPUT) is SHAREGPT_OUTPUT


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "x", "uniform:5:3", "uniform:5", "lognormal:1", "lognormal:nan:1", "64:2"]
)
def test_what_is_no_distribution_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="no distribution of lengths"):
        parse_lengths(text, SHAREGPT_PROMPT)


def test_the_same_seed_is_the_same_load_and_another_one_is_not() -> None:
    workload = Synthetic(Arrivals.POISSON, 1.0, Uniform(1, 99), LogNormal(3, 1, 1, 500), 10.0)
    assert workload.requests(5.0, 1) == workload.requests(5.0, 1)
    assert workload.requests(5.0, 1) != workload.requests(5.0, 2)


def test_a_trace_is_replayed_in_order_at_its_speed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 3000, "input_length": 20, "output_length": 4, "hash_ids": [1]}\n\n'
        '{"timestamp": 500, "prompt": "hello", "output_length": 2}\n'
    )
    requests = Trace.read(path).requests(2.0, 0)
    assert [(each.at, each.prompt_tokens, each.output_tokens, each.prompt) for each in requests] == [
        (0.25, 1, 2, "hello"),
        (1.5, 20, 4, None),
    ]
    assert Trace.read(path).requests(2.0, 1)[1].seed != requests[1].seed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ('{"timestamp": 1}', "input_length"),
        (NEGATIVE, "negative"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 2, "output_length": 4}\n' + line + "\n")
    with pytest.raises(CommandError, match=words):
        Trace.read(path)
