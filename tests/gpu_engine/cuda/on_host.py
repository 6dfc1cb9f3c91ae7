"""Compiles programs of host/ with the kernels' own sources, whose instructions host/*.cuh replace, and runs them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

HOST = Path(__file__).parent / "host"
REPOSITORY = HOST.parents[3]
KERNELS = REPOSITORY / "services/gpu_engine/cuda/kernels"


def run_on_host(
    folder: Path, program: str, defines: Mapping[str, int], arguments: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Build ``program`` of host/ in ``folder`` with BLINK_* defines, and run it."""
    kernels = folder / "kernels"
    shutil.copytree(KERNELS, kernels)
    for header in HOST.glob("*.cuh"):  # a file's includes are looked for beside it first
        shutil.copy(header, kernels)
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++20", "-O1", "-w", "-pthread", f"-I{kernels}", f"-I{HOST}", f"-I{REPOSITORY}"]
    flags += [f"-DBLINK_{name}={value}" for name, value in defines.items()]
    built = folder / "program"
    subprocess.run([*compiler, *flags, str(HOST / program), "-o", str(built)], check=True)
    return subprocess.run([built, *arguments], check=False, capture_output=True, text=True)
