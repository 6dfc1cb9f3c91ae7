"""What can go wrong with a ring."""

from __future__ import annotations

from services.common.errors import BlinkError


class RingError(BlinkError):
    """Base of all errors of this package. ``cause`` is one of few names, for counting."""

    cause = "RING"


class IncompatibleRingError(RingError):
    """The ring was made by another build or for another model.

    ``field`` says which check failed; ``expected`` and ``found`` are its values here and in the ring.
    """

    cause = "INCOMPATIBLE_RING"

    def __init__(self, field: str, expected: object, found: object) -> None:
        super().__init__(f"ring {field} is {found}, expected {expected}")
        self.field, self.expected, self.found = field, expected, found


class RingInUseError(RingError):
    """The path belongs to a running engine. ``pid`` is its process, or None when the system does not tell."""

    def __init__(self, path: str, pid: int | None) -> None:
        owner = "another process" if pid is None else f"process {pid}"
        super().__init__(f"ring {path} is in use by {owner}: stop it, or choose another instance or path")
        self.path, self.pid = path, pid


class TransportLostError(RingError):
    """The far side of the transport is gone, or the transport was closed."""

    cause = "TRANSPORT_LOST"


class LaneLostError(RingError):
    """The lane no longer belongs to this gateway: another attached, or the lease ran out. Attach again."""

    cause = "LANE_LOST"


class LaneFullError(RingError):
    """More submissions than slots: one would overwrite a doorbell that the engine has not read."""

    def __init__(self, lane: int, slots: int) -> None:
        super().__init__(f"lane {lane}: all {slots} doorbells wait for the engine; a slot was used before its FINISH")


class AttachTimeoutError(RingError):
    """The engine did not take the attach in time."""

    cause = "ATTACH_TIMEOUT"


class CorruptLogError(RingError):
    """The token log's head makes no sense: entries would be lost or repeated."""

    cause = "CORRUPT_LOG"
