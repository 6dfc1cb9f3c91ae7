"""Which models the fused decode step can run; all others stay with separate kernels."""

from __future__ import annotations

from typing import cast

import pytest

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")
from services.gpu_engine.cuda.fused_decode import fuses
from services.gpu_engine.cuda.weights import DeviceWeights
from services.gpu_engine.models.checkpoint import FAMILIES
from services.gpu_engine.models.family import TensorSpec
from tests.gpu_engine.models.tiny import tiny_config

WHOLE = {"hidden": 192, "ffn": 320, "heads": 6, "kv_heads": 2, "head_dim": 64}


class Weights:
    """Knows which of a model's matrices are in FP8: those whose name ends like this."""

    def __init__(self, fp8: str = "no matrix") -> None:
        self._ending = fp8

    def fp8(self, first: TensorSpec) -> bool:
        return first.hugging_face.endswith(self._ending)


def fused(weights: Weights, **changes: int) -> bool:
    config = tiny_config(**(WHOLE | changes))
    return fuses(config, FAMILIES[config.architecture](config), cast(DeviceWeights, weights))


def test_dense_layers_in_bf16_of_whole_stages_are_fused() -> None:
    assert fused(Weights())


@pytest.mark.parametrize("changes", [{"hidden": 200}, {"ffn": 328}], ids=str)
def test_a_width_that_is_not_whole_stages_is_not(changes: dict[str, int]) -> None:
    assert not fused(Weights(), **changes)


@pytest.mark.parametrize("matrix", ["q_proj.weight", "o_proj.weight", "gate_proj.weight", "down_proj.weight"])
def test_a_matrix_in_fp8_is_not(matrix: str) -> None:
    assert not fused(Weights(matrix))
