"""Numbers on the command line."""

from __future__ import annotations

from collections.abc import Callable

import typer


def between(low: float, high: float) -> Callable[[str], float]:
    """A parser for numbers from ``low`` to ``high``; unlike typer's own range it lets no NaN pass."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise typer.BadParameter(f"{text!r} is not a number from {low:g} to {high:.10g}")
        return value

    return number
