"""How long prompts and outputs are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 1 << 20


class Lengths(Protocol):
    """A distribution of numbers of tokens."""

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """[count] lengths, each at least 1."""


@dataclass(frozen=True)
class Uniform:
    """Every length from ``low`` to ``high`` alike."""

    low: int
    high: int

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return rng.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True)
class LogNormal:
    """exp(normal(mu, sigma)), what is outside moved to the nearest bound."""

    mu: float
    sigma: float
    low: int
    high: int

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        drawn = np.clip(rng.lognormal(self.mu, self.sigma, count), self.low, self.high)
        return np.rint(drawn).astype(np.int64)


# ShareGPT's means are 161 prompt and 338 output tokens (arXiv 2309.06180, Figure 11). These have them before they are
# cut, exp(mu + sigma² / 2); sigma, which is not given there, is ours, for long tails as in that figure.
SHAREGPT_PROMPT = LogNormal(4.30, 1.25, 4, 2048)
SHAREGPT_OUTPUT = LogNormal(5.50, 0.81, 4, 2048)


def parse_lengths(text: str, sharegpt: Lengths) -> Lengths:
    """``128``, ``uniform:LOW:HIGH``, ``lognormal:MU:SIGMA[:LOW:HIGH]`` or ``sharegpt``. Raises ValueError."""
    kind, *numbers = text.split(":")
    try:
        match kind, numbers:
            case "sharegpt", []:
                return sharegpt
            case "uniform", [low, high]:
                return Uniform(*_bounds(low, high))
            case "lognormal", [mu, sigma]:
                return LogNormal(*_shape(mu, sigma), 1, MAX_TOKENS)
            case "lognormal", [mu, sigma, low, high]:
                return LogNormal(*_shape(mu, sigma), *_bounds(low, high))
            case count, []:
                return Uniform(*_bounds(count, count))
    except ValueError as error:
        raise ValueError(f"{text!r} is no distribution of lengths: {error}") from error
    raise ValueError(
        f"{text!r} is no distribution of lengths: N, uniform:LOW:HIGH, lognormal:MU:SIGMA[:LOW:HIGH] and sharegpt are"
    )


def _bounds(low: str, high: str) -> tuple[int, int]:
    first, last = int(low), int(high)
    if not 1 <= first <= last <= MAX_TOKENS:
        raise ValueError(f"{first} to {last} tokens, must ascend within 1 to {MAX_TOKENS}")
    return first, last


def _shape(mu: str, sigma: str) -> tuple[float, float]:
    center, spread = float(mu), float(sigma)
    if not (0 <= center <= 14 and 0 <= spread <= 4):
        raise ValueError(f"mu {center:g} must be within 0 to 14, sigma {spread:g} within 0 to 4")
    return center, spread
