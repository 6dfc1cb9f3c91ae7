"""What tells a machine that can't have a node from a fault of the node's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.node.preflight import CONTROLLERS, missing

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root")


def cgroups_v2(directory: Path, controllers: str) -> Path:
    (directory / "cgroup.controllers").write_text(controllers)
    (directory / "cgroup.subtree_control").touch()
    return directory


def test_the_controllers_that_are_missing_are_named(tmp_path: Path) -> None:
    assert list(missing({}, cgroups_v2(tmp_path, "cpu memory io"))) == [
        "cgroup controller cpuset",
        "cgroup controller pids",
    ]


def test_each_version_of_cgroups_has_its_own_files(tmp_path: Path) -> None:
    for name in CONTROLLERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").touch()
    assert not list(missing({}, tmp_path))
    assert not list(missing({}, cgroups_v2(tmp_path, " ".join(CONTROLLERS))))


@needs_root
def test_a_feature_is_named_with_what_its_trial_says(tmp_path: Path) -> None:
    whole = cgroups_v2(tmp_path, " ".join(CONTROLLERS))
    trials = {"lunch": "echo no such device >&2; false", "devices": "ip link show lo"}
    assert list(missing(trials, whole)) == ["lunch (no such device)"]
