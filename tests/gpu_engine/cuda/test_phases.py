"""The seconds of a start's phases."""

from __future__ import annotations

import itertools

import pytest

from services.gpu_engine.cuda.phases import Phases


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at it finds a quarter of a second more."""
    monkeypatch.setattr("services.gpu_engine.cuda.phases.perf_counter", itertools.count(0.0, 0.25).__next__)


def test_a_phase_that_comes_again_is_summed_up_where_it_stood() -> None:
    phases = Phases()
    for phase in ("load", "choose", "load"):
        with phases.of(phase):
            pass
    assert list(phases.seconds().items()) == [("load", 0.5), ("choose", 0.25)]


def test_a_phase_that_fails_has_taken_its_time_too() -> None:
    phases = Phases()
    with pytest.raises(MemoryError), phases.of("load"):
        raise MemoryError
    assert phases.seconds() == {"load": 0.25}


def test_a_phase_within_another_counts_in_both() -> None:
    phases = Phases()
    with phases.of("start"), phases.of("load"):
        pass
    assert phases.seconds() == {"load": 0.25, "start": 0.75}


def test_without_phases_there_are_no_seconds() -> None:
    assert not Phases().seconds()
