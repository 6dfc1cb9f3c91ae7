"""The core as a block of threads beside real gateway threads, compiled with sanitizers (stress.cpp)."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from services.ring import codegen

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("stress.cpp")


def build(folder: Path, sanitizers: str) -> Path:
    (folder / "ring_layout.hpp").write_text(codegen.render())
    program = folder / "stress"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++17", "-O0", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-fsanitize={sanitizers}"]
    flags += ["-fno-sanitize-recover=all", f"-I{ROOT}", f"-I{folder}"]
    subprocess.run([*compiler, *flags, str(SOURCE), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_threads_and_hostile_memory_leave_sanitizers_silent(tmp_path: Path, sanitizers: str) -> None:
    program = build(tmp_path, sanitizers)
    for threads, requests in ((1, 500), (3, 40)):
        result = subprocess.run(
            [str(program), str(threads), str(requests)], capture_output=True, text=True, timeout=60, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "\nok: 0 faults" in "\n" + result.stdout, result.stdout
