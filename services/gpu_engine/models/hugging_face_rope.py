"""Rotary settings of a Hugging Face config.json, in both spellings.

The older one has rope_theta and partial_rotary_factor beside rope_scaling, the newer one rope_parameters holds all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.gpu_engine.models.config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from services.gpu_engine.models.errors import CorruptCheckpointError, UnsupportedCheckpointError
from services.gpu_engine.models.rope import longrope_attention_factor, yarn_attention_factor


class RopeSettings:
    """Reads the rotary part of ``values``; ``path`` names the file in messages."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values
        self._rope: dict[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}

    @property
    def base(self) -> float:
        return self._check("rope_theta", self._rope.get("rope_theta", self._values.get("rope_theta", 10000.0)))

    @property
    def partial(self) -> float:
        """The part of each head that is rotated, 0 to 1."""
        name = "partial_rotary_factor"
        return self._check(name, self._rope.get(name, self._values.get(name, 1.0)))

    def scaling(self) -> RopeScaling | None:
        """How frequencies are changed for longer contexts.

        Raises:
            CorruptCheckpointError: a number is missing or is none.
            UnsupportedCheckpointError: another kind of scaling, or a variant of one.
        """
        kind = self._rope.get("rope_type", self._rope.get("type", "default"))
        if "long_factor" in self._rope and kind in ("su", "yarn"):
            kind = "longrope"  # its names in early Phi-3 checkpoints
        match kind:
            case "default":
                return None
            case "linear":
                return LinearScaling(self._number("factor"))
            case "llama3":
                low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
                return Llama3Scaling(self._number("factor"), low, high, self._original_context())
            case "yarn":
                return self._yarn()
            case "longrope":
                return self._longrope()
        raise UnsupportedCheckpointError(
            f"{self._path}: RoPE scaling {kind!r} is not supported, only default, linear, llama3, yarn and longrope"
        )

    def _yarn(self) -> YarnScaling:
        for name in ("mscale", "mscale_all_dim"):
            if self._rope.get(name):
                raise UnsupportedCheckpointError(f"{self._path}: YaRN {name} is {self._rope[name]!r}, not supported")
        if self._rope.get("truncate", True) is not True:
            raise UnsupportedCheckpointError(f"{self._path}: YaRN truncate is {self._rope['truncate']!r}, must be true")
        factor = self._number("factor")
        return YarnScaling(
            factor,
            self._original_context(),
            self._attention_factor(yarn_attention_factor(factor)),
            float(self._rope.get("beta_fast") or 32.0),
            float(self._rope.get("beta_slow") or 1.0),
        )

    def _longrope(self) -> LongRopeScaling:
        for name in ("short_mscale", "long_mscale"):
            if self._rope.get(name):
                raise UnsupportedCheckpointError(
                    f"{self._path}: LongRoPE {name} is {self._rope[name]!r}, not supported"
                )
        original = self._original_context()
        if original < 2:
            raise CorruptCheckpointError(f"{self._path}: LongRoPE's original context is {original}, must be above 1")
        factor = self._number("factor", self._context() / original)
        return LongRopeScaling(
            self._factors("short_factor"),
            self._factors("long_factor"),
            original,
            self._attention_factor(longrope_attention_factor(factor, original)),
        )

    def _factors(self, name: str) -> tuple[float, ...]:
        values = self._rope.get(name)
        if not isinstance(values, list) or not all(type(v) in (int, float) and v > 0 for v in values):
            raise CorruptCheckpointError(f"{self._path}: rope scaling {name} must be a list of numbers above 0")
        return tuple(map(float, values))

    def _attention_factor(self, default: float) -> float:
        return default if self._rope.get("attention_factor") is None else self._number("attention_factor")

    def _original_context(self) -> int:
        name = "original_max_position_embeddings"
        return int(self._check(name, self._values.get(name) or self._rope.get(name) or self._context()))

    def _context(self) -> float:
        return self._check("max_position_embeddings", self._values.get("max_position_embeddings"))

    def _number(self, name: str, default: Any = None) -> float:
        value = self._rope.get(name)
        return self._check(f"rope scaling {name}", default if value is None else value)

    def _check(self, name: str, value: Any) -> float:
        if type(value) not in (int, float):
            raise CorruptCheckpointError(f"{self._path}: {name} is {value!r}, must be a number")
        return float(value)
