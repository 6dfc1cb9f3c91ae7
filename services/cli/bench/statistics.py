"""Percentiles, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

CONFIDENCE = 0.95


def t_probability(t: float, freedom: int) -> float:
    """P(|T| < t) of Student's t with ``freedom`` degrees: the sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for index in range(2 if odd else 1, freedom - 1, 2):
        term *= cosine * cosine * index / (index + 1)
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))


def t_quantile(confidence: float, freedom: int) -> float:
    """The t within which ``confidence`` of the distribution lies, on both sides of 0."""
    low, high = 0.0, 1.0
    while t_probability(high, freedom) < confidence:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, freedom) < confidence else (low, middle)
    return high


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """In which the mean lies with CONFIDENCE, by Student's t over ``values`` of repeats; None for fewer than two."""
    if len(values) < 2:
        return None
    half = t_quantile(CONFIDENCE, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half
