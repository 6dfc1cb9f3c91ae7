"""The maximum serviceable load: the highest rate at which a condition holds."""

from __future__ import annotations

from collections.abc import Callable

LOWEST_SHARE = 1 / 1024  # of the first rate, below which the search gives up


def highest_rate(serves: Callable[[float], bool], start: float, precision: float) -> float | None:
    """At most ``precision`` (a share of the rate) below a rate that ``serves`` refuses; None when it refuses all.

    Doubles or halves from ``start`` until the answer changes, then bisects: ``serves`` is taken to be monotonic.
    """
    served, refused = (start, None) if serves(start) else (None, start)
    while served is None or refused is None:
        if served is None:
            assert refused is not None
            rate = refused / 2
            if rate < start * LOWEST_SHARE:
                return None
        else:
            rate = served * 2
        if serves(rate):
            served = rate
        else:
            refused = rate
    while refused - served > precision * refused:
        rate = (served + refused) / 2
        if serves(rate):
            served = rate
        else:
            refused = rate
    return served
