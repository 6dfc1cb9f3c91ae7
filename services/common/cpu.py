"""CPUs: how many this process may use (its quota, not the node's cores), which ones, and running on some of them."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_cpus(cgroup_root: Path = CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Whole CPUs, at least 1: the affinity mask bounded by the tightest cgroup quota (v1 or v2) above this process."""
    cpus = len(os.sched_getaffinity(0))
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return cpus
    quotas = [quota for line in lines for quota in _quotas(cgroup_root, line)]
    return max(1, min([cpus, *(math.ceil(quota) for quota in quotas)]))


def cpu_name(proc: Path = Path("/proc")) -> str:
    """As the processor calls itself; "unknown CPU" where it does not."""
    lines = (proc / "cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def parse_cpus(text: str) -> frozenset[int]:
    """CPUs as the kernel lists them, ``0-3,8``. Raises ValueError."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        span = range(int(first), int(last or first) + 1)
        if not span:
            raise ValueError(f"{part!r} is no range of CPUs")
        cpus.update(span)
    return frozenset(cpus)


@contextmanager
def on_cpus(cpus: Collection[int]) -> Iterator[None]:
    """Run the calling thread, and the processes and threads that it starts, on these."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _quotas(root: Path, membership: str) -> Iterator[float]:
    """CPUs that the groups of one line of /proc/self/cgroup allow, ``hierarchy:controllers:path``."""
    hierarchy, controllers, path = membership.split(":", 2)
    if hierarchy == "0":
        top, limit_of = root, _limit_v2
    elif "cpu" in controllers.split(","):
        top, limit_of = root / controllers, _limit_v1
    else:
        return
    group = top / path.strip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(top):
            break
        try:
            quota, period = limit_of(directory)
        except (OSError, ValueError):
            continue  # no limit is set here
        if quota > 0:
            yield quota / period


def _limit_v2(directory: Path) -> tuple[int, int]:
    """Raises ValueError for "max", which is no limit."""
    quota, period = (directory / "cpu.max").read_text().split()
    return int(quota), int(period)


def _limit_v1(directory: Path) -> tuple[int, int]:
    """The quota is -1 for no limit."""
    return (
        int((directory / "cpu.cfs_quota_us").read_text()),
        int((directory / "cpu.cfs_period_us").read_text()),
    )
