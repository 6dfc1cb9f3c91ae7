"""e4m3: all 256 codes, nearest codes of any number, and rows whose largest magnitude uses the whole range."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from services.gpu_engine.models.float8 import VALUES, dequantize, quantize_rows, to_e4m3


def worth(code: int) -> float:
    """A code read bit by bit."""
    sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return float(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_all_codes_are_worth_what_their_bits_say() -> None:
    np.testing.assert_array_equal(VALUES, [worth(code) for code in range(256)])
    assert np.signbit(VALUES[[0x80, 0]]).tolist() == [True, False]


def test_every_number_keeps_its_code() -> None:
    codes = np.arange(256, dtype=np.uint8)
    numbers = ~np.isnan(VALUES)
    np.testing.assert_array_equal(to_e4m3(VALUES)[numbers], codes[numbers])
    assert np.isnan(VALUES[to_e4m3(np.array([np.nan, -np.nan], np.float32))]).all()


def test_other_numbers_go_to_the_nearest_with_ties_to_the_even_code() -> None:
    positive = VALUES[:0x7F].astype(np.float64)
    for index, (low, high) in enumerate(itertools.pairwise(positive)):
        middle = np.float32((low + high) / 2)
        even = index if index % 2 == 0 else index + 1
        near = np.array([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(1e9))])
        assert to_e4m3(near.astype(np.float32)).tolist() == [index, even, index + 1]
        assert to_e4m3(-near.astype(np.float32)).tolist() == [index | 128, even | 128, (index + 1) | 128]


@pytest.mark.parametrize("value", [449, 464, 480, 1e9, np.inf])
def test_numbers_beyond_the_largest_saturate(value: float) -> None:
    assert VALUES[to_e4m3(np.array([value, -value], np.float32))].tolist() == [448, -448]


def test_a_quantized_row_is_within_half_a_unit_and_an_empty_row_stays_empty() -> None:
    values = np.random.default_rng(0).standard_normal((5, 300)).astype(np.float32) * np.array(
        [[1e-6], [1], [50], [0], [1]], np.float32
    )
    codes, scale = quantize_rows(values)
    assert scale.values.shape == (5, 1)
    assert (np.abs(VALUES[codes]).max(axis=1) == [448, 448, 448, 0, 448]).all()
    unit = np.maximum(2.0 ** np.floor(np.log2(np.maximum(np.abs(values / scale.values), 2.0**-6))) / 8, 2.0**-9)
    assert (np.abs(dequantize(codes, scale) - values) <= unit * scale.values * 0.51).all()
