from __future__ import annotations

from pathlib import Path

import pytest

from services.bootstrap.errors import BootstrapError
from services.bootstrap.memory import available_bytes, require_memory

GIB = 1 << 30


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 9999999 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n")
    return path


def cgroup(tmp_path: Path, limits: dict[str, tuple[str, int, int]]) -> tuple[Path, Path]:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/a/b\n")
    for group, (limit, used, reclaimable) in limits.items():
        directory = root / group
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text(f"{used}\n")
        (directory / "memory.stat").write_text(f"anon 1\ninactive_file {reclaimable}\n")
    return root, membership


def test_without_cgroup_limits_it_is_the_machines(meminfo: Path, tmp_path: Path) -> None:
    assert available_bytes(meminfo, *cgroup(tmp_path, {"a/b": ("max", GIB, 0)})) == 4 * GIB
    assert available_bytes(meminfo, tmp_path / "nothing", tmp_path / "nowhere") == 4 * GIB


def test_the_tightest_cgroup_above_the_process_counts(meminfo: Path, tmp_path: Path) -> None:
    limits = {"a/b": (str(3 * GIB), GIB, 0), "a": (str(2 * GIB), int(1.5 * GIB), GIB // 4)}
    assert available_bytes(meminfo, *cgroup(tmp_path, limits)) == 3 * GIB // 4


def test_this_machine_has_memory() -> None:
    assert available_bytes() > 0


def test_what_cannot_fit_is_refused_naming_each_part() -> None:
    require_memory({"weights": 3 * GIB, "KV cache": GIB}, 4 * GIB)
    with pytest.raises(BootstrapError, match=r"5120 MiB needed \(weights 3072, KV cache 2048\), 4096 MiB available"):
        require_memory({"weights": 3 * GIB, "KV cache": 2 * GIB}, 4 * GIB)
