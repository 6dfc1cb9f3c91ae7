"""What the operator sees of a cluster. CPU is in millicores for what others request and in whole cores for tenants."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from enum import StrEnum
from typing import NamedTuple

from services.colocation.decision.demands import Demands, Taint

MILLI = 1000
START_LIMIT = timedelta(minutes=2)
RETRY_AFTER = 5  # start limits, for a tenant that could not be started: it holds cores a sixth of the time at most


class Key(NamedTuple):
    """A Tenant's name in the cluster."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class EvictionOrder(StrEnum):
    """Which tenants give way first; ties go to the newest."""

    LOWEST_PRIORITY_FIRST = "LowestPriorityFirst"
    NEWEST_FIRST = "NewestFirst"
    LARGEST_FIRST = "LargestFirst"


class Preemption(StrEnum):
    """Whether a waiting tenant may push out others of lower priority."""

    NEVER = "Never"
    LOWER_PRIORITY = "LowerPriority"


@dataclass(frozen=True, slots=True)
class Node:
    """A node and what runs on it that is no tenant."""

    name: str
    labels: dict[str, str]
    allocatable: int  # millicores
    serving: int = 0  # requested by Blink's own pods
    others: int = 0  # requested by other pods that are not tenants'
    leaving: int = 0  # held by tenants' pods that have been told to end
    schedulable: bool = True  # ready, and neither cordoned nor going away
    taints: tuple[Taint, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """From ``start`` to ``end`` on ``days`` (0 is Monday); one that ends before it starts runs past midnight."""

    days: frozenset[int]
    start: time
    end: time


@dataclass(frozen=True, slots=True)
class Objectives:
    """The SLO guard's limits. Seconds; ``recovery`` is the share of a limit below which a figure counts as calm."""

    ttft: float | None
    tpot: float | None
    window: float
    recovery: float
    restore_after: float


class Stage(StrEnum):
    """How far the guard has gone, in this order."""

    NORMAL = "Normal"
    SHRINK = "Shrink"  # every tenant at its minimum
    SUSPEND_HALF = "SuspendHalf"  # half of the freed cores given back
    SUSPEND_ALL = "SuspendAll"  # all of them
    EVICT = "Evict"  # pods that take their time to end are killed


@dataclass(frozen=True, slots=True)
class Guard:
    """What the guard must remember between two looks. It lies in the pool's status, so it outlives the operator."""

    stage: Stage = Stage.NORMAL
    since: datetime | None = None
    calm_since: datetime | None = None

    @property
    def restoring(self) -> bool:
        """The stage was entered from a harsher one, and nothing has been near a limit since."""
        return self.calm_since is not None and (self.since is None or self.calm_since <= self.since)


@dataclass(frozen=True, slots=True)
class Reading:
    """P99 over the pool's window in seconds; None where no request ended in it."""

    ttft: float | None
    tpot: float | None
    partial: bool = False  # of some gateways alone, as others do not answer


@dataclass(frozen=True, slots=True)
class Pool:
    """A TenantPool. ``reading`` is None while the gateways' metrics can't be read."""

    name: str
    created: datetime
    selector: dict[str, str]
    baseline_cores: int
    reserved_cores: int
    cpu_percent: int = 100
    bandwidth: int | None = None  # MB/s of memory bandwidth that a node's tenants may declare together
    objectives: Objectives | None = None
    eviction_order: EvictionOrder = EvictionOrder.LOWEST_PRIORITY_FIRST
    windows: tuple[Window, ...] = ()
    time_zone: str = "UTC"
    guard: Guard = field(default_factory=Guard)
    reading: Reading | None = None
    deleting: bool = False
    invalid: str = ""  # why it can't be followed: nobody is let in, and nobody thrown out for it


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a released tenant is, with how many cores."""

    node: str
    cores: int


class Outcome(StrEnum):
    """How a tenant's Job ended."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """A Tenant and its Job, compared by identity. ``placement`` is there while the Job is released."""

    key: Key
    pool: str
    created: datetime
    min_cores: int
    max_cores: int
    priority: int = 0
    preemption: Preemption = Preemption.NEVER
    deadline: datetime | None = None
    bandwidth_per_core: int = 0  # MB/s
    demands: Demands = field(default_factory=Demands)
    queued: datetime | None = None  # since when it waits; None: since it was created
    changed: datetime | None = None  # when its placement last changed
    has_job: bool = False
    placement: Placement | None = None
    pod_pending: bool = False  # released, but its pod runs nowhere
    pending_since: datetime | None = None  # of such a pod that is to be scheduled, or can't be made
    pending_why: str = ""
    not_started: datetime | None = None  # when it last could not be started, and made room for others
    not_started_why: str = ""
    resizable: bool = True  # its pod's node can change its CPU in place, if the cluster's API server can
    held_by_kueue: bool = False  # it has a node and cores, but Kueue has not admitted its Job
    lingering: bool = False  # suspended, but a pod still takes its time to end
    outcome: Outcome | None = None
    outcome_why: str = ""  # as the Job says
    invalid: str = ""  # what of its spec can't be followed: it is not let in

    @property
    def waiting_since(self) -> datetime:
        return self.queued or self.created

    @property
    def least_bandwidth(self) -> int:
        """MB/s that it declares for its minimum of cores."""
        return self.bandwidth_per_core * self.min_cores


@dataclass(frozen=True, slots=True)
class Cluster:
    """One moment.

    ``resizable``: a running pod's CPU can be changed in place. ``start_limit``: a released tenant's pod is scheduled by
    then, or the tenant makes room for others.
    """

    now: datetime
    nodes: tuple[Node, ...]
    pools: tuple[Pool, ...]
    tenants: tuple[Tenant, ...]
    resizable: bool = False
    start_limit: timedelta = START_LIMIT

    def tried_again(self, tenant: Tenant) -> datetime | None:
        """From when on a tenant that could not be started may have cores again; None for now."""
        again = tenant.not_started and tenant.not_started + RETRY_AFTER * self.start_limit
        return again if again and self.now < again else None
