"""Which CPU runs what, for measurements beside neighbours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cores:
    """CPUs of a client, of one thread that must run undisturbed, and of everything else."""

    client: int
    loop: int
    others: frozenset[int]

    @classmethod
    def of_this_machine(cls) -> Cores:
        """Hyperthreads of the first two's cores stay out of ``others``. Raises RuntimeError when there are too few."""
        free = sorted(os.sched_getaffinity(0))
        rest = [cpu for cpu in free if cpu not in _siblings(free[0])]
        others = frozenset(rest) - _siblings(rest[0]) if rest else frozenset()
        if not others:
            raise RuntimeError(f"CPUs {free} are too few: the client, the loop and the neighbours need a core each")
        return cls(free[0], rest[0], others)


def move_process(pid: int, cpus: Collection[int]) -> None:
    """Move all threads of a process, with those that they start meanwhile. Raises RuntimeError when some stay."""
    for _ in range(10):
        astray = []
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if os.sched_getaffinity(int(task.name)) != set(cpus):
                    astray.append(int(task.name))
                    os.sched_setaffinity(int(task.name), cpus)
        if not astray:
            return
    raise RuntimeError(f"threads {astray} of process {pid} do not stay on CPUs {sorted(cpus)}")


def _siblings(cpu: int) -> set[int]:
    """Hyperthreads of the CPU's core, itself among them."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    found = {cpu}
    with contextlib.suppress(OSError):
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def throttled_ms() -> float:
    """Milliseconds for which the quota of this process's cgroup has stopped its CPUs; 0 where that is not told."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines()
        return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("throttled_usec"))
    return 0.0
