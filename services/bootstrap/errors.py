"""Why bootstrap can't start or go on."""

from services.common.errors import BlinkError


class BootstrapError(BlinkError):
    """The engine can't be started or has ended; the message is for the operator."""


class NoFreeLaneError(BlinkError):
    """Every lane of the ring is leased to another gateway."""
