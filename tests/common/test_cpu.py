from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.common.cpu import available_cpus


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def cgroups(root: Path, limits: dict[str, str]) -> Path:
    """Makes cgroup directories with these cpu.max files; returns the membership file of a process in a/b."""
    (root / "a" / "b").mkdir(parents=True)
    for directory, limit in limits.items():
        (root / directory / "cpu.max").write_text(limit + "\n")
    membership = root / "membership"
    membership.write_text("0::/a/b\n")
    return membership


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 8),
        ({"a/b": "max 100000"}, 8),
        ({"a/b": "200000 100000"}, 2),
        ({"a/b": "150000 100000"}, 2),
        ({"a/b": "50000 100000"}, 1),
        ({"a": "300000 100000", "a/b": "max 100000"}, 3),
        ({"a": "300000 100000", "a/b": "400000 100000"}, 3),
        ({"": "100000 100000"}, 1),
        ({"a/b": "3200000 100000"}, 8),
        ({"a/b": "nonsense"}, 8),
    ],
)
@pytest.mark.usefixtures("eight_cores")
def test_the_tightest_quota_counts_not_the_nodes_cores(tmp_path: Path, limits: dict[str, str], expected: int) -> None:
    assert available_cpus(tmp_path, cgroups(tmp_path, limits)) == expected


@pytest.mark.usefixtures("eight_cores")
def test_a_system_without_cgroups_uses_the_affinity_mask(tmp_path: Path) -> None:
    assert available_cpus(tmp_path, tmp_path / "absent") == 8


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({}, 8),
        ({"a/b": "-1"}, 8),
        ({"a/b": "250000"}, 3),
        ({"a": "100000", "a/b": "250000"}, 1),
        ({"": "600000", "a/b": "-1"}, 6),
    ],
)
@pytest.mark.usefixtures("eight_cores")
def test_quotas_of_cgroup_v1_count_too(tmp_path: Path, quotas: dict[str, str], expected: int) -> None:
    (tmp_path / "cpu,cpuacct" / "a" / "b").mkdir(parents=True)
    for directory, quota in quotas.items():
        group = tmp_path / "cpu,cpuacct" / directory
        (group / "cpu.cfs_quota_us").write_text(quota + "\n")
        (group / "cpu.cfs_period_us").write_text("100000\n")
    membership = tmp_path / "membership"
    membership.write_text("11:memory:/a/b\n4:cpu,cpuacct:/a/b\n1:name=systemd:/a\n0::/\n")
    assert available_cpus(tmp_path, membership) == expected
