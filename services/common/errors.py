"""The root of Blink's error hierarchy."""

from __future__ import annotations


class BlinkError(Exception):
    """A failure whose message is one clear line for the operator: what was wrong, with which value, what to do.

    Every package derives its own errors from this one. A process that ends with it prints the message and exits
    with ``exit_code``; any other exception is a fault of Blink's and keeps its traceback.
    """

    exit_code = 1
