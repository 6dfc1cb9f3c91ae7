"""Where the time of a start goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Phases:
    """Sums up the host's seconds in each phase, in the order in which they first ended."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """What runs inside is a part of ``phase``, also if it fails."""
        began = perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + perf_counter() - began

    def seconds(self) -> dict[str, float]:
        """By phase, to be logged: in hundredths."""
        return {phase: round(seconds, 2) for phase, seconds in self._seconds.items()}
