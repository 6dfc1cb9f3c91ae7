from __future__ import annotations

import numpy as np
import pytest

from bench.stages import OURS, marks_of, stages_of
from services.cli.bench.generator import Share
from services.cli.bench.kinds import Prompts, Protocol
from services.cli.bench.outcome import Outcome
from services.cli.bench.target import Target
from services.cli.bench.workload import Request

MARKS = ("sent", "entered", "in_ring", "begun", "logged", "seen", "writing", "received")


def test_stages_follow_each_other_without_a_gap_so_that_they_add_up_to_the_time_to_first_token() -> None:
    rng = np.random.default_rng(0)
    marks = {key: dict(zip(MARKS, np.sort(rng.random(len(MARKS))).tolist(), strict=True)) for key in "abc"}
    measured = stages_of(marks, "abc")
    assert np.allclose(sum(measured.stages.values()), measured.total)
    assert len(OURS) == len(measured.stages) - 2  # the engine's
    engine = measured.stages["engine: until its step"] + measured.stages["engine: the step"]
    assert np.allclose(measured.ours + engine, measured.total)


def test_a_request_that_was_not_answered_in_full_ends_the_measurement() -> None:
    share = Share([Outcome(0.0, sent=0.1, arrivals=[0.2], output_tokens=3)], [], 0.0, 0.0)
    target = Target(Protocol.GRPC, "", "", Prompts.IDS, vocabulary=1000, temperature=0.0, ignore_eos=True, timeout=1.0)
    assert marks_of(share, [Request(0.0, 4, 3, seed=1)], target)
    with pytest.raises(RuntimeError, match="3 tokens of"):
        marks_of(share, [Request(0.0, 4, 5, seed=1)], target)
