"""CPU time from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.cli.bench.accounts import TICK, machine_cpu_seconds, tree_cpu_seconds
from services.cli.bench.conditions import Conditions
from services.cli.errors import CommandError


def stat(proc: Path, pid: int, parent: int, ticks: int, name: str = "x") -> None:
    folder = proc / str(pid)
    folder.mkdir()
    fields = ["S", str(parent), *["0"] * 9, str(ticks), "1", "0", "2", *["0"] * 30]
    (folder / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")


def test_a_process_counts_with_its_descendants_whatever_their_names(tmp_path: Path) -> None:
    stat(tmp_path, 10, 1, 100, "a) S 99 (b")
    stat(tmp_path, 11, 10, 200)
    stat(tmp_path, 12, 11, 300)
    stat(tmp_path, 20, 1, 5000)
    assert tree_cpu_seconds([10], tmp_path) == pytest.approx((600 + 3 * 3) * TICK)
    assert tree_cpu_seconds([10, 12], tmp_path) == pytest.approx((600 + 3 * 3) * TICK)  # none twice
    with pytest.raises(ProcessLookupError, match="30"):
        tree_cpu_seconds([30], tmp_path)


def test_the_machines_time_is_work_without_waiting_or_other_machines(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 20 30 9000 800 5 6 7000 50 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    assert machine_cpu_seconds(tmp_path) == pytest.approx((100 + 20 + 30 + 5 + 6) * TICK)


def test_a_real_process_that_works_is_seen_to() -> None:
    code = "import time; e = time.process_time() + 0.3\nwhile time.process_time() < e: pass\nprint(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert tree_cpu_seconds([child.pid]) >= 0.25
        child.communicate(b"\n")


def test_what_cannot_be_measured_is_said_with_its_reason() -> None:
    here = Conditions("127.0.0.1:50051", (), (), beside_neighbours=False)
    beside = Conditions("127.0.0.1:50051", (), (), beside_neighbours=True)
    far = Conditions("http://10.1.2.3:8000/v1", (), (), beside_neighbours=False)
    assert any("whole machine" in note for note in here.notes)
    assert any("neighbours run" in note for note in beside.notes)
    assert any("another machine" in note for note in far.notes)
    with beside.account() as account:
        time.process_time()
    assert account.host_cpu_seconds(0.0) is None
    with here.account() as account:
        pass
    assert account.host_cpu_seconds(0.0) is not None
    mine = Conditions("127.0.0.1:1", (os.getpid(),), (), beside_neighbours=True)
    with mine.account() as account:
        pass
    assert account.host_cpu_seconds(1e9) is not None  # processes are theirs alone: nothing is taken off
    with (
        pytest.raises(CommandError, match="--pid"),
        Conditions("127.0.0.1:1", (1 << 22,), (), beside_neighbours=False).account(),
    ):
        pass
