"""``python -m tests.cluster.node.leftovers`` takes down what the node of a run that was killed has left behind.

Nothing is touched while a node runs, and nothing but what lies in, or was started out of, the folders of such nodes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.node.network import Network

PREFIX = "blink-node-"
LOCK = Path("/run/blink-node.lock")  # a node is root's, and one place for all, whatever their caches and homes are
CGROUPS = Path("/sys/fs/cgroup")
SETTINGS = Path("/proc/sys")
SYSCTLS = "sysctls.json"  # of a node's folder: what they were before its kubelet
CLEAR_SECONDS = 60.0


@contextlib.contextmanager
def only_node(wait: bool = True) -> Iterator[bool]:
    """One node at a time on this machine: its network has fixed addresses. False where there is one, and no waiting."""
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def clear(but: Path | None = None, temporary: Path | None = None) -> list[Path]:
    """Whatever is left of nodes, but of this one's folder; the caller is the ``only_node``. Returns their folders."""
    left = [each for each in (temporary or Path(tempfile.gettempdir())).glob(f"{PREFIX}*") if each != but]
    for directory in left:
        end_processes(directory)
        unmount(directory)
        restore_sysctls(directory)
        if not mounts_below(directory):  # what is mounted there is not ours to delete
            shutil.rmtree(directory, ignore_errors=True)
    Network.remove()
    if left:
        remove_cgroups()
    return left


def end_processes(directory: Path) -> None:
    """Those that run in the folder or name it, such as a container's shim, and all that descend from them."""
    end = time.monotonic() + CLEAR_SECONDS
    while (found := _processes_of(directory)) and time.monotonic() < end:
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def mounts_below(directory: Path) -> list[str]:
    points = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
    return [point for point in points if point.startswith(f"{directory}/")]


def unmount(directory: Path) -> None:
    for mount in sorted(mounts_below(directory), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)


def keep_sysctls(directory: Path, names: tuple[str, ...]) -> None:
    """As they are, in the node's folder, so that they outlive whoever is to restore them."""
    values = {name: (SETTINGS / name).read_text() for name in names}
    (directory / SYSCTLS).write_text(json.dumps(values))


def restore_sysctls(directory: Path) -> None:
    for kept in directory.glob(f"**/{SYSCTLS}"):
        for name, value in json.loads(kept.read_text()).items():
            (SETTINGS / name).write_text(value)


def remove_cgroups() -> None:
    """The kubelet's, which are empty. Children first; a process that has just been killed may still be in one."""
    for group in CGROUPS.glob("*/kubepods"):
        end = time.monotonic() + CLEAR_SECONDS
        while group.exists() and time.monotonic() < end:
            for each in sorted((group, *group.rglob("*/")), reverse=True):
                with contextlib.suppress(OSError):
                    each.rmdir()
            time.sleep(0.1)


def _processes_of(directory: Path) -> set[int]:
    parents: dict[int, int] = {}
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            status = (process / "stat").read_text().rpartition(")")[2].split()
            parents[int(process.name)] = int(status[1])
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            within = (process / "cwd").readlink()
            if f"{directory}/" in command or within.is_relative_to(directory):
                found.add(int(process.name))
    found -= {os.getpid(), os.getppid()}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found


if __name__ == "__main__":
    with only_node(wait=False) as alone:
        if alone:
            for folder in clear():
                print(f"cleared what was left of a node in {folder}")
