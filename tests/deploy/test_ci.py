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
        assert (shim.wait(10), within.wait(10)) == (-signal.SIGKILL, -signal.SIGKILL)
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
    monkeypatch.setattr(leftovers, "CACHE", tmp_path)
    with leftovers.only_node() as first, leftovers.only_node(wait=False) as second:
        assert (first, second) == (True, False)
    with leftovers.only_node(wait=False) as third:
        assert third
