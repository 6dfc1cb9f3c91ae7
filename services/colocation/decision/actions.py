"""What the operator does to a cluster, each act with the reason that its event gives."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from services.colocation.decision.model import Guard, Key


class Reason(StrEnum):
    """Why something was decided, as events and conditions name it."""

    QUEUED = "Queued"
    KUEUE_HOLDS = "KueueHolds"
    RELEASED = "Released"
    GROWN = "Grown"
    RUNNING = "Running"
    SHRUNK_FOR_SLO = "ShrunkForSLO"
    SHRUNK_FOR_ROOM = "ShrunkForRoom"
    SUSPENDED_FOR_SLO = "SuspendedForSLO"
    EVICTED_FOR_SLO = "EvictedForSLO"
    PREEMPTED = "Preempted"
    NO_ROOM = "NoRoom"
    TOO_LARGE = "TooLarge"
    NO_SUITABLE_NODE = "NoSuitableNode"
    TOO_MUCH_BANDWIDTH = "TooMuchBandwidth"
    BEHIND_RESERVATION = "BehindReservation"
    WINDOW_CLOSED = "WindowClosed"
    GUARD_HOLDS = "GuardHolds"
    NO_POOL = "NoSuchPool"
    POOL_DELETED = "PoolDeleted"
    NODE_LOST = "NodeLost"
    NOT_STARTED = "NotStarted"
    TRIED_LATER = "TriedLater"
    REFUSED = "Refused"
    INVALID = "Invalid"
    POOL_INVALID = "PoolInvalid"
    RANGE_CHANGED = "RangeChanged"
    CORES_RECLAIMED = "CoresReclaimed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"


@dataclass(frozen=True, slots=True)
class CreateJob:
    """Make the tenant's Job, suspended."""

    key: Key
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Release:
    """Let the Job run on ``node`` with ``cores``."""

    key: Key
    reason: Reason
    message: str
    node: str
    cores: int


@dataclass(frozen=True, slots=True)
class Resize:
    """Give the running pod ``cores``, in place."""

    key: Key
    reason: Reason
    message: str
    cores: int


@dataclass(frozen=True, slots=True)
class Suspend:
    """Suspend the Job: its pod is asked to end and has its grace period to do so."""

    key: Key
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Suspend the Job and kill what is left of its pod."""

    key: Key
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The tenant can't be served any more: its Job goes away."""

    key: Key
    reason: Reason
    message: str


Action = CreateJob | Release | Resize | Suspend | Evict | Fail


class Phase(StrEnum):
    """Where a tenant stands."""

    WAITING = "Waiting"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class TenantReport:
    """What the Tenant's status is to say. ``position`` counts from 1 in its pool's queue."""

    phase: Phase
    reason: Reason | None
    message: str
    node: str = ""
    cores: int = 0
    position: int = 0
    queued: datetime | None = None


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What the TenantPool's status is to say; ``freed`` is by node, in cores."""

    guard: Guard
    freed: dict[str, int]
    used: dict[str, int]
    conflicts: dict[str, str]  # node -> the pool that has it
    open: bool
    waiting: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision on one moment of a cluster."""

    actions: tuple[Action, ...]
    tenants: dict[Key, TenantReport]
    pools: dict[str, PoolReport]
