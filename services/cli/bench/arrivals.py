"""When requests arrive, whatever becomes of the ones before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.cli.bench.kinds import Arrivals


def arrival_times(
    kind: Arrivals, rate: float, seconds: float, rng: np.random.Generator, shape: float
) -> NDArray[np.float64]:
    """[requests] seconds from the start, ascending and below ``seconds``; ``rate`` is requests a second.

    ``shape`` is of the bursty gaps' gamma distribution: their coefficient of variation is 1 / sqrt(shape), and 1 would
    be a Poisson process.
    """
    if kind is Arrivals.CONSTANT:
        return np.arange(round(rate * seconds)) / rate
    if kind is Arrivals.POISSON:
        shape = 1.0
    times = np.zeros(0)
    while not times.size or times[-1] < seconds:
        gaps = rng.gamma(shape, 1 / (rate * shape), max(16, round(rate * seconds)))
        times = np.concatenate((times, (times[-1] if times.size else 0.0) + np.cumsum(gaps)))
    return times[times < seconds]
