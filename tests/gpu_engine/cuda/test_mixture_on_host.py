"""The kernels of mixtures, compiled for the host: right results, the same bits in every block shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_engine.cuda.on_host import run_on_host

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
    result = run_on_host(tmp_path, "mixture.cpp", GEOMETRY | mixture, arguments)
    assert result.returncode == 0, result.stdout + result.stderr
