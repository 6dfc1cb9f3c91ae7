"""How many CPUs this process may use: its quota, not the node's cores."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_cpus(cgroup_root: Path = CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Whole CPUs, at least 1: the affinity mask bounded by the tightest cgroup v2 quota above this process."""
    cpus = len(os.sched_getaffinity(0))
    quota = _cgroup_quota(cgroup_root, membership)
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


def _cgroup_quota(root: Path, membership: Path) -> float | None:
    """CPUs that the cgroups allow; None when they set no limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    group = root / own
    quotas = []
    for directory in (group, *group.parents):
        if not directory.is_relative_to(root):
            break
        try:
            limit, period = (directory / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if limit != "max":
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)
