"""The device's view of a step has the core's layout."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings", reason="needs the CUDA libraries of blink[cuda]")

from services.gpu_engine.core import _core
from services.gpu_engine.cuda.step_arrays import MAX_SUPPRESSED, ROW_SAMPLING


def test_row_sampling_is_the_cores() -> None:
    assert ROW_SAMPLING.itemsize == _core.ROW_SAMPLING.itemsize
    assert dict(ROW_SAMPLING.fields or {}) == dict(_core.ROW_SAMPLING.fields or {})
    assert _core.ROW_SAMPLING["suppress"].shape == (MAX_SUPPRESSED,)
