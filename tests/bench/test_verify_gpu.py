"""bench.verify_gpu says what became of every test, also of those that a stopped process did not get to."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bench.gpu_groups import ALONE, TESTS, Group, lone_groups, parallel_groups
from bench.verify_gpu import Result, run

BODY = """
import time
import pytest

def test_good():
    pass

def test_bad():
    assert 1 + 1 == 3, "sums are off"

def test_left_out():
    pytest.skip("no GPU")

@pytest.mark.parametrize("i", range(4))
def test_of_many(i):
    pass
"""


def group_of(folder: Path, body: str, seconds: float = 60.0, share: int = 0, shares: int = 1) -> Group:
    file = folder / "test_something.py"
    file.write_text(body)
    return Group(file, seconds, share, shares)


def run_now(group: Group) -> Result:
    return run(group, dict(os.environ), time.monotonic() + 100.0)


def test_outcomes_and_the_first_failure_are_told(tmp_path: Path) -> None:
    result = run_now(group_of(tmp_path, BODY))
    assert dict(result.counts) == {"passed": 5, "failed": 1, "skipped": 1}
    assert "test_bad: test_something.py:9: AssertionError: sums are off" in result.reason()
    assert not result.good


def test_shares_make_up_the_whole(tmp_path: Path) -> None:
    results = [run_now(group_of(tmp_path, BODY, share=share, shares=3)) for share in range(3)]
    assert sum(result.counts.total() for result in results) == 7
    assert len({test for result in results for test in result.ended}) == 7


def test_a_test_that_hangs_is_named_and_what_came_before_it_counted(tmp_path: Path) -> None:
    group = group_of(tmp_path, BODY + "\ndef test_endless():\n    time.sleep(1000)\n", seconds=15.0)
    result = run_now(group)
    assert result.counts["passed"] == 5
    assert len(result.failures) == 1
    assert ">       assert 1 + 1 == 3" in result.log
    assert "stopped after 15 s, in test_endless" in Result(group, ended=result.ended, stopped=result.stopped).reason()
    assert not result.good


def test_tests_that_were_all_left_out_are_not_good(tmp_path: Path) -> None:
    result = run_now(group_of(tmp_path, "import pytest\npytest.importorskip('nothing_of_this_name')\n"))
    assert not result.good
    assert "nothing_of_this_name" in result.reason()


def test_a_file_that_cannot_be_collected_is_a_failure(tmp_path: Path) -> None:
    result = run_now(group_of(tmp_path, "import nothing_of_this_name\n"))
    assert not result.good
    assert "nothing_of_this_name" in result.reason()


def test_every_file_of_gpu_tests_is_in_a_group() -> None:
    found = {group.file.stem for group in (*parallel_groups(), *lone_groups())}
    assert found == {file.stem for file in TESTS.glob("test_*.py")}
    assert ALONE.keys() <= found
