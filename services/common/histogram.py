"""Cumulative histograms of Prometheus: their quantiles, as ``histogram_quantile`` defines them, and their increase."""

from __future__ import annotations

import math
from collections.abc import Mapping

Buckets = Mapping[float, float]  # upper bound, infinity among them -> observations up to it


def quantile(buckets: Buckets, share: float) -> float | None:
    """The value that ``share`` of the observations do not exceed, linear within its bucket; None of no observation.

    In the last bucket, which has no end, it is the greatest bound there is.
    """
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    rank = share * buckets[bounds[-1]]
    low = below = 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= rank:
            if math.isinf(bound):
                return low
            within = count - below
            # Rounding may carry the sum past its bucket's end.
            return bound if within <= 0 else min(bound, low + (bound - low) * (rank - below) / within)
        low, below = bound, count
    return low


def increase(before: Buckets, now: Buckets) -> dict[float, float]:
    """What came between two scrapes. A counter that went back was begun anew, so all of it came since."""
    total = max(now, default=math.inf)
    if before.get(total, 0.0) > now.get(total, 0.0):
        return dict(now)
    return {bound: max(0.0, count - before.get(bound, 0.0)) for bound, count in now.items()}


def add(into: dict[float, float], more: Buckets) -> None:
    for bound, count in more.items():
        into[bound] = into.get(bound, 0.0) + count
