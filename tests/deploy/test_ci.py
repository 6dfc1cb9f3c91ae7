"""A run of CI that is told to end, or whose time is over, leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.node import leftovers
from tests.cluster.processes import ENDED

RUN = Path(__file__).parents[2] / ".ci" / "run"
# What a test's fixture is: it cleans up, if it is given the time.
WORK = """
import sys, time
from pathlib import Path
from tests.cluster.processes import end_by_sigterm
end_by_sigterm()
at = Path(sys.argv[1])
try:
    (at / "begun").touch()
    time.sleep(60)
finally:
    time.sleep(0.5)
    (at / "cleaned").touch()
"""


def work(at: Path) -> list[str]:
    return [sys.executable, "-c", WORK, str(at)]


def until(holds: object, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_takes_too_long_is_told_to_end_and_cleans_up(tmp_path: Path) -> None:
    done = subprocess.run([RUN, "by", "2", *work(tmp_path)], timeout=60, check=False)
    assert done.returncode == 124
    assert (tmp_path / "cleaned").exists()


def test_what_ends_the_run_ends_what_it_runs_and_waits_for_its_end(tmp_path: Path) -> None:
    run = subprocess.Popen([RUN, "by", "60", *work(tmp_path)])
    until((tmp_path / "begun").exists)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == ENDED
    assert (tmp_path / "cleaned").exists()


def test_ctrl_c_at_the_terminal_ends_what_it_runs_and_waits_for_its_end(tmp_path: Path) -> None:
    terminal = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    run = subprocess.Popen([sys.executable, "-c", terminal, RUN, "by", "60", *work(tmp_path)], stdin=subprocess.PIPE)
    until((tmp_path / "begun").exists)
    assert run.stdin is not None
    run.stdin.write(b"\x03")
    run.stdin.flush()
    assert run.wait(60) == ENDED
    assert (tmp_path / "cleaned").exists()
    run.stdin.close()


def test_what_it_runs_does_not_ignore_signals_that_a_terminal_sends() -> None:
    """All that is tested would ignore them, too, and tests of an end by SIGINT would wait for ever."""
    script = (
        "import signal; print(*(signal.getsignal(n) is not signal.SIG_IGN for n in (signal.SIGINT, signal.SIGQUIT)))"
    )
    done = subprocess.run(
        [RUN, "by", "60", sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == "True True\n"


@pytest.fixture
def make(tmp_path: Path) -> dict[str, str]:
    """An environment whose ``make`` makes targets that take for ever, fail, or begin a process that does not end."""
    program = tmp_path / "bin" / "make"
    program.parent.mkdir()
    endless = f"sleep 60 & echo $! >{tmp_path}/child; wait"
    program.write_text(f"#!/bin/sh\ncase $1 in endless) {endless} ;; broken) exit 3 ;; esac\n")
    program.chmod(0o755)
    return os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def test_a_target_that_hangs_fails_the_run_by_its_name_and_leaves_no_process(
    make: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [RUN, "demand", "endless", "2"], env=make, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, "FAILED make endless: not done by minute 0 of this run\n")
    child = int((tmp_path / "child").read_text())
    until(lambda: not alive(child))


def test_a_target_that_fails_fails_the_run_by_its_name(make: dict[str, str]) -> None:
    done = subprocess.run(
        [RUN, "demand", "broken", "60"], env=make, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (3, "FAILED make broken\n")


def test_every_part_of_the_run_has_a_limit() -> None:
    """What runs for long is run by by, or by what calls it: a command in the foreground keeps TERM waiting."""
    lines = [line.strip() for line in RUN.read_text().splitlines()]
    assert not [line for line in lines if line.startswith(("make ", "apt-get "))]


def test_how_a_command_ends_is_how_the_run_takes_it() -> None:
    assert subprocess.run([RUN, "by", "60", "sh", "-c", "exit 7"], timeout=60, check=False).returncode == 7


def test_a_process_of_a_test_ends_with_it_even_when_it_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.cluster.processes import Processes;"
        "them = Processes(Path(sys.argv[1])); them.start('sleeper', ['sleep', '60']);"
        "print(them._running['sleeper'].pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        sleeper = int(test.stdout.readline())
        until(lambda: Path(f"/proc/{sleeper}/comm").read_text() == "sleep\n")  # what binds it to its parent is done
        test.kill()
    until(lambda: not alive(sleeper))


def test_processes_of_a_killed_nodes_folder_are_ended_with_all_that_descend_from_them(tmp_path: Path) -> None:
    node, other = tmp_path / "blink-node-a", tmp_path / "elsewhere"
    for each in (node, other):
        each.mkdir()
    # As a shim has a container's process below it: the folder is named by the first alone.
    naming = ["sh", "-c", "sleep 60 & echo $!; wait", f"{node}/containerd.sock"]
    with subprocess.Popen(naming, stdout=subprocess.PIPE, text=True) as shim:
        assert shim.stdout is not None
        container = int(shim.stdout.readline())
        within = subprocess.Popen(["sleep", "60"], cwd=node)
        bystander = subprocess.Popen(["sleep", "60"], cwd=other)
        leftovers.end_processes(node)
        assert within.wait(10) == -signal.SIGKILL
        assert shim.wait(10) in {-signal.SIGKILL, 0}  # 0 where its child was killed first, for which it waits
        until(lambda: not alive(container))
        assert bystander.poll() is None
        bystander.kill()
        bystander.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")
def test_mounts_of_a_killed_nodes_folder_are_taken_back(tmp_path: Path) -> None:
    node = tmp_path / "blink-node-a" / "node"
    below = node / "kubelet" / "volume"
    below.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", below], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("root may not mount here")
    assert leftovers.mounts_below(node.parent) == [str(below)]
    leftovers.unmount(node.parent)
    assert leftovers.mounts_below(node.parent) == []


def test_settings_that_a_killed_nodes_kubelet_wrote_are_what_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, kernel = tmp_path / "blink-node-a" / "node", tmp_path / "sys" / "kernel"
    for each in (node, kernel):
        each.mkdir(parents=True)
    monkeypatch.setattr(leftovers, "SETTINGS", kernel.parent)
    panic = kernel / "panic"
    panic.write_text("0\n")
    leftovers.keep_sysctls(node, ("kernel/panic",))
    panic.write_text("10\n")
    leftovers.restore_sysctls(node.parent)
    assert panic.read_text() == "0\n"


def test_while_a_node_runs_nobody_takes_it_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "LOCK", tmp_path / "lock")
    with leftovers.only_node() as first, leftovers.only_node(wait=False) as second:
        assert (first, second) == (True, False)
    with leftovers.only_node(wait=False) as third:
        assert third


def test_runs_with_other_homes_and_caches_know_of_each_others_node(tmp_path: Path) -> None:
    homes = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    where = [sys.executable, "-c", "from tests.cluster.node.leftovers import LOCK; print(LOCK)"]
    done = subprocess.run(where, env=os.environ | homes, stdout=subprocess.PIPE, text=True, check=True)
    assert Path(done.stdout.strip()) == leftovers.LOCK
