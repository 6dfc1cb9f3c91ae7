"""The kernels of mixtures, compiled for the host: right results, the same bits in every block shape."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

HOST = Path(__file__).parent / "host"
REPOSITORY = HOST.parents[3]
KERNELS = REPOSITORY / "services/gpu_engine/cuda/kernels"
GEOMETRY = {"HIDDEN": 256, "FFN": 64, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 64, "ROTARY_DIM": 64, "PAGE_SIZE": 16}


@pytest.mark.parametrize(
    ("mixture", "arguments"),
    [
        ({"EXPERTS": 48, "CHOSEN": 3, "EXPERT_FFN": 64}, ["5"]),
        ({"EXPERTS": 16, "CHOSEN": 2, "EXPERT_FFN": 128}, ["19"]),
        ({"EXPERTS": 16, "CHOSEN": 1, "EXPERT_FFN": 64}, ["140", "alike"]),
    ],
)
def test_a_layer_matches_float64_in_every_shape(tmp_path: Path, mixture: dict[str, int], arguments: list[str]) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(KERNELS, kernels)
    for header in HOST.glob("*.cuh"):  # a file's includes are looked for beside it first
        shutil.copy(header, kernels)
    defines = [f"-DBLINK_{name}={value}" for name, value in (GEOMETRY | mixture).items()]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-std=c++20", "-O1", "-w", "-pthread", f"-I{kernels}", f"-I{HOST}", f"-I{REPOSITORY}", *defines]
    program = tmp_path / "mixture"
    subprocess.run([*compiler, *flags, str(HOST / "mixture.cpp"), "-o", str(program)], check=True)
    result = subprocess.run([program, *arguments], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
