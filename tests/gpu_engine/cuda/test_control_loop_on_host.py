"""The control loop's own source as a block of real threads under a thread sanitizer (host/loop/control_loop.cpp)."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from services.ring import codegen
from tests.gpu_engine.cuda.on_host import HOST, REPOSITORY

LOOP = HOST / "loop"
REPLACED = "services/gpu_engine/cuda/control_loop"
REQUESTS = 12


def test_the_loops_warps_share_nothing_without_a_barrier_or_an_atomic(tmp_path: Path) -> None:
    (tmp_path / "ring_layout.hpp").write_text(codegen.render())
    replaced = tmp_path / REPLACED
    replaced.mkdir(parents=True)
    (replaced / "instructions.cuh").write_text((LOOP / "instructions.cuh").read_text())
    program = tmp_path / "control_loop"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++17", "-O0", "-g1", "-w", "-pthread", "-fsanitize=thread", f"-I{tmp_path}", f"-I{REPOSITORY}"]
    subprocess.run([*compiler, *flags, str(LOOP / "control_loop.cpp"), "-o", str(program)], check=True)
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    result = subprocess.run(
        [str(program), str(REQUESTS)], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("ok: 0 faults"), result.stdout
