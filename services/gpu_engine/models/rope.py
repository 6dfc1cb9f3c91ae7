"""Rotary position embedding: the frequencies of a model, in float64."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.models.config import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    YarnScaling,
)


def rotary_frequencies(config: ModelConfig, context: int | None = None) -> tuple[NDArray[np.float64], float]:
    """Angular frequency of each rotary pair, and the factor that multiplies rotated queries and keys.

    Args:
        context: longest sequence that is served; the model's own limit if None. LongRoPE's long factors are for
            contexts beyond the original one (docs/decisions/0012-model-families.md).

    Returns:
        frequencies [rotary_dim / 2] in radians per position, and the attention factor of YaRN and LongRoPE (1 for all
        else).
    """
    pairs = config.rotary_dim // 2
    frequencies = config.rope_base ** (-np.arange(pairs, dtype=np.float64) / pairs)
    match config.rope_scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case FrequencyFactors(factors):
            return frequencies / np.array(factors, np.float64), 1.0
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(frequencies, scaling, config), scaling.attention_factor
        case LongRopeScaling() as scaling:
            beyond = (config.context if context is None else context) > scaling.original_context
            divisors = np.array(scaling.long if beyond else scaling.short, np.float64)
            return frequencies / divisors, scaling.attention_factor


def _llama3(frequencies: NDArray[np.float64], scaling: Llama3Scaling) -> NDArray[np.float64]:
    """Interpolate by how many turns a pair makes over the original context (Llama 3.1 model card)."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: NDArray[np.float64], scaling: YarnScaling, config: ModelConfig) -> NDArray[np.float64]:
    """NTK by parts (arXiv 2309.00071, section 3.2), with the pair indices rounded outwards as released models do."""

    def pair_turning(turns: float) -> float:
        wavelength_ratio = scaling.original_context / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(wavelength_ratio) / (2 * math.log(config.rope_base))

    low = max(math.floor(pair_turning(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_turning(scaling.beta_slow)), config.rotary_dim - 1)
    ramp = np.clip((np.arange(frequencies.size) - low) / max(high - low, 0.001), 0.0, 1.0)
    return frequencies * ((1 - ramp) + ramp / scaling.factor)


def yarn_attention_factor(factor: float) -> float:
    """YaRN's recommended scale of queries and keys (section 3.4)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """LongRoPE's scale of queries and keys for a context ``factor`` times the original (section 3.3)."""
    return math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0
