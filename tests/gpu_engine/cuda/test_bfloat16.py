"""Stored weights of every type as bfloat16."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from services.gpu_engine.cuda.bfloat16 import from_bfloat16, rows_as_bfloat16, to_bfloat16
from services.gpu_engine.models.tensors import StoredTensor, TensorType

QUANTIZED = {
    TensorType.F32: gguf.GGMLQuantizationType.F32,
    TensorType.F16: gguf.GGMLQuantizationType.F16,
    TensorType.BF16: gguf.GGMLQuantizationType.BF16,
    TensorType.Q4_0: gguf.GGMLQuantizationType.Q4_0,
    TensorType.Q4_1: gguf.GGMLQuantizationType.Q4_1,
    TensorType.Q8_0: gguf.GGMLQuantizationType.Q8_0,
}


def test_rounding_is_to_nearest_with_ties_to_even() -> None:
    cases = {
        0x3F800000: 0x3F80,  # 1
        0x3F807FFF: 0x3F80,
        0x3F808000: 0x3F80,  # a tie, even below
        0x3F808001: 0x3F81,
        0x3F818000: 0x3F82,  # a tie, even above
        0x7F7FFFFF: 0x7F80,  # rounds to infinity
        0xFF800000: 0xFF80,  # -infinity
        0x00000000: 0x0000,
        0x80000000: 0x8000,
    }
    values = np.array(list(cases), np.uint32).view(np.float32)
    np.testing.assert_array_equal(to_bfloat16(values), list(cases.values()))
    nans = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(from_bfloat16(to_bfloat16(nans))).all()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_every_stored_type_gives_the_values_that_gguf_gives(kind: TensorType) -> None:
    values = np.random.default_rng(1).standard_normal((12, 96)).astype(np.float32)
    data = gguf.quantize(values, QUANTIZED[kind]).view(np.uint8).reshape(12, -1)
    expected = gguf.dequantize(data, QUANTIZED[kind]).reshape(12, 96)
    found = rows_as_bfloat16(StoredTensor((12, 96), kind, data), 3, 9)
    np.testing.assert_array_equal(found, to_bfloat16(expected[3:9].astype(np.float32)))
