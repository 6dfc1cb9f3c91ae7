"""What the operator can fail with."""

from __future__ import annotations

from services.common.errors import BlinkError


class ColocationError(BlinkError):
    """Base of the operator's errors."""


class InvalidObjectError(ColocationError):
    """An object of the cluster says what can't be followed; the message goes into its condition."""


class ScrapeError(ColocationError):
    """A gateway's metrics could not be read."""
