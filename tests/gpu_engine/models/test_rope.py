"""Rotary frequencies against values worked out by hand from the papers' formulas."""

from __future__ import annotations

import math

import numpy as np

from services.gpu_engine.models.config import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
)
from services.gpu_engine.models.rope import longrope_attention_factor, rotary_frequencies
from tests.gpu_engine.models.tiny import tiny_config


def test_unscaled_frequencies_are_a_geometric_series() -> None:
    frequencies, factor = rotary_frequencies(tiny_config(head_dim=4, rope_base=10000.0))
    np.testing.assert_allclose(frequencies, [1.0, 0.01], rtol=1e-15)
    assert factor == 1.0


def test_linear_and_explicit_factors_divide() -> None:
    frequencies, _ = rotary_frequencies(tiny_config(head_dim=4, rope_scaling=LinearScaling(4.0)))
    np.testing.assert_allclose(frequencies, [0.25, 0.0025], rtol=1e-15)
    frequencies, _ = rotary_frequencies(tiny_config(head_dim=4, rope_scaling=FrequencyFactors((1.0, 2.0))))
    np.testing.assert_allclose(frequencies, [1.0, 0.005], rtol=1e-15)


def test_llama3_keeps_short_wavelengths_divides_long_ones_and_blends_between() -> None:
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    config = tiny_config(head_dim=128, rope_base=500000.0, rope_scaling=scaling)
    frequencies, _ = rotary_frequencies(config)
    for index, frequency in enumerate(frequencies):
        plain = 500000.0 ** (-2 * index / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            expected = plain
        elif wavelength > 8192:
            expected = plain / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert math.isclose(frequency, expected, rel_tol=1e-12)


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_scales_attention() -> None:
    scaling = YarnScaling(4.0, 2048, 1.2)
    config = tiny_config(head_dim=64, rope_base=10000.0, rope_scaling=scaling)
    frequencies, factor = rotary_frequencies(config)
    plain, _ = rotary_frequencies(tiny_config(head_dim=64, rope_base=10000.0))
    assert factor == 1.2
    # Turns over the original context: 32 at pair 8.06 (rounded down to 8), 1 at pair 20.1 (rounded up to 21).
    low, high = 8, 21
    assert math.floor(64 * math.log(2048 / (32 * 2 * math.pi)) / (2 * math.log(10000.0))) == low
    assert math.ceil(64 * math.log(2048 / (2 * math.pi)) / (2 * math.log(10000.0))) == high
    np.testing.assert_allclose(frequencies[: low + 1], plain[: low + 1])
    np.testing.assert_allclose(frequencies[high:], plain[high:] / 4)
    middle = 14
    ramp = (middle - low) / (high - low)
    assert math.isclose(frequencies[middle], plain[middle] * (1 - ramp) + plain[middle] / 4 * ramp, rel_tol=1e-12)


def test_partial_rotary_has_the_frequencies_of_a_smaller_head() -> None:
    frequencies, _ = rotary_frequencies(tiny_config(head_dim=16, partial_rotary=0.25))
    np.testing.assert_allclose(frequencies, [1.0, 0.01], rtol=1e-15)


def test_longrope_divides_by_the_factors_of_the_served_context() -> None:
    scaling = LongRopeScaling((1.0, 2.0), (4.0, 8.0), 64, longrope_attention_factor(4.0, 64))
    config = tiny_config(head_dim=4, context=256, rope_scaling=scaling)
    assert math.isclose(scaling.attention_factor, math.sqrt(1 + 1 / 3))
    for context, expected in ((64, [1.0, 0.005]), (65, [0.25, 0.00125]), (None, [0.25, 0.00125])):
        frequencies, factor = rotary_frequencies(config, context)
        np.testing.assert_allclose(frequencies, expected, rtol=1e-15)
        assert factor == scaling.attention_factor
    assert longrope_attention_factor(1.0, 64) == 1.0
