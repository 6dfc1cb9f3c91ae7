"""One object of the cluster as decisions see it. Fields that the API server has validated are taken as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from services.colocation.decision.model import (
    EvictionOrder,
    Guard,
    Key,
    Node,
    Objectives,
    Outcome,
    Placement,
    Pool,
    Preemption,
    Reading,
    Stage,
    Tenant,
    Window,
)
from services.colocation.names import (
    CORES_ANNOTATION,
    NODE_ANNOTATION,
    QUEUE_LABEL,
)
from services.colocation.observe.demands import demands_of, taints_of
from services.colocation.observe.quantities import cpu_request, millicores

Object = Mapping[str, Any]

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
ALL_DAYS = frozenset(range(7))
_CORES = re.compile(r"[1-9][0-9]{0,5}")
ENDED = frozenset({"Succeeded", "Failed"})
NO_POD = "its Job's events say why it has no pod"
# Of the Job's controller (DefaultJobPodFailureBackOff, MaxJobPodFailureBackOff).
BACK_OFF, MOST_BACK_OFF = timedelta(seconds=10), timedelta(minutes=10)
# Fields of a Job's status that say it has a pod. The Job's controller sees a pod's end a second late: until then the
# Job counts as "active" a pod that is known to be gone.
_HAS_A_POD = ("active", "terminating", "uncountedTerminatedPods")


def instant(text: str | None) -> datetime | None:
    """A time as the API server writes it."""
    return None if text is None else datetime.fromisoformat(text)


def timestamp(moment: datetime | None, precision: str = "seconds") -> str | None:
    """The same, the other way."""
    return None if moment is None else moment.astimezone(UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def created(thing: Object) -> datetime:
    return datetime.fromisoformat(thing["metadata"]["creationTimestamp"])


def condition(thing: Object, kind: str) -> bool:
    """Whether the object has this condition."""
    return _true_condition(thing, kind) is not None


def _true_condition(thing: Object, kind: str) -> Object | None:
    found = (thing.get("status") or {}).get("conditions") or ()
    return next((each for each in found if each["type"] == kind and each["status"] == "True"), None)


def _message(thing: Object | None, kind: str) -> str:
    """What a condition says; empty where there is none."""
    found = _true_condition(thing, kind) if thing is not None else None
    return str((found or {}).get("message", ""))


def node_of(thing: Object, serving: int, others: int, leaving: int) -> Node:
    """A Node, and what its pods hold in millicores."""
    metadata, status = thing["metadata"], thing.get("status") or {}
    cordoned = (thing.get("spec") or {}).get("unschedulable", False)
    return Node(
        name=metadata["name"],
        labels=dict(metadata.get("labels") or {}),
        allocatable=millicores((status.get("allocatable") or {}).get("cpu", 0)),
        serving=serving,
        others=others,
        leaving=leaving,
        schedulable=not cordoned and condition(thing, "Ready") and "deletionTimestamp" not in metadata,
        taints=taints_of(thing.get("spec") or {}),
    )


def pool_of(thing: Object, reading: Reading | None) -> Pool:
    """A TenantPool. One whose time zone does not exist says so, and has no windows."""
    spec, status, metadata = thing["spec"], thing.get("status") or {}, thing["metadata"]
    schedule = spec.get("schedule") or {}
    ceilings = spec.get("ceilings") or {}
    zone = schedule.get("timeZone", "UTC")
    invalid = "" if _is_time_zone(zone) else f"spec.schedule.timeZone is {zone!r}, which is no time zone"
    guard = status.get("guard") or {}
    return Pool(
        name=metadata["name"],
        created=created(thing),
        selector=dict(spec["nodeSelector"]),
        baseline_cores=spec["serving"]["baselineCores"],
        reserved_cores=spec["serving"].get("reservedCores", 0),
        cpu_percent=ceilings.get("cpuPercent", 100),
        bandwidth=ceilings.get("memoryBandwidthMBps"),
        objectives=_objectives(spec.get("sloGuard")),
        eviction_order=EvictionOrder(spec.get("evictionOrder", EvictionOrder.LOWEST_PRIORITY_FIRST)),
        windows=() if invalid else tuple(_window(each) for each in schedule.get("windows", ())),
        time_zone=zone,
        guard=Guard(
            Stage(guard.get("stage", Stage.NORMAL)), instant(guard.get("since")), instant(guard.get("calmSince"))
        ),
        reading=reading,
        deleting="deletionTimestamp" in metadata,
        invalid=invalid,
    )


def tenant_of(thing: Object, job: Object | None, pods: Iterable[Object]) -> Tenant:
    """A Tenant with its Job and its Job's pods."""
    spec, status = thing["spec"], thing.get("status") or {}
    cores = spec["cores"]
    deadline, invalid = _deadline(spec.get("deadline"))
    live = list(pods)
    own = [pod for pod in live if job is not None and belongs(pod, job)]
    staying = [pod for pod in own if "deletionTimestamp" not in pod["metadata"]]
    placement = placement_of(job, staying)
    pending = placement is not None and not any((p.get("spec") or {}).get("nodeName") for p in staying)
    since, why = _waits_to_start(job, staying) if pending and job is not None else (None, "")
    return Tenant(
        key=Key(thing["metadata"]["namespace"], thing["metadata"]["name"]),
        pool=spec["pool"],
        created=created(thing),
        min_cores=cores["min"],
        max_cores=cores.get("max", cores["min"]),
        priority=spec.get("priority", 0),
        preemption=Preemption(spec.get("preemption", Preemption.NEVER)),
        deadline=deadline,
        bandwidth_per_core=spec.get("memoryBandwidthMBpsPerCore", 0),
        demands=demands_of(spec["template"]["spec"]["template"]["spec"]),
        queued=instant(status.get("queuedAt")),
        changed=instant(status.get("changedAt")),
        has_job=job is not None,
        placement=placement,
        pod_pending=pending,
        pending_since=since,
        pending_why=why,
        not_started=instant(status.get("notStartedAt")),
        not_started_why=status.get("notStartedWhy", ""),
        resizable=any(resizable(pod) for pod in staying),
        held_by_kueue=placement is not None and job is not None and bool(job["spec"].get("suspend")),
        lingering=placement is None and bool(live),
        outcome=outcome_of(job) or _recorded_outcome(status),
        outcome_why=_message(job, "Failed") if outcome_of(job) else "",
        invalid=invalid,
    )


def _waits_to_start(job: Object, pods: list[Object]) -> tuple[datetime | None, str]:
    """Since when a released Job's pod is not scheduled, or not even made, and why.

    A Job that Kueue holds does not wait to start, nor one whose release its controller has not seen yet, nor one that
    is about to have a pod counted. One whose pods have failed backs off first: it waits since then.
    """
    if pods:
        conditions = [each for pod in pods for each in (pod.get("status") or {}).get("conditions") or ()]
        told = [each.get("message", "") for each in conditions if each["type"] == "PodScheduled"]
        return min(map(created, pods)), next(filter(None, told), "it is not scheduled")
    status = job.get("status") or {}
    if job["spec"].get("suspend") or condition(job, "Suspended") or any(status.get(each) for each in _HAS_A_POD):
        return None, ""
    since = _status_written(job) or instant(status.get("startTime"))
    return since and since + _back_off(status.get("failed") or 0), NO_POD


def _status_written(job: Object) -> datetime | None:
    """When the Job's controller last changed its status: it has counted the end of the last pod then."""
    entries = job["metadata"].get("managedFields") or ()
    return max((written for each in entries if (written := _status_time(each))), default=None)


def _status_time(entry: Object) -> datetime | None:
    return instant(entry.get("time")) if entry.get("subresource") == "status" else None


def _back_off(failed: int) -> timedelta:
    """At most this long the Job's controller waits before the next pod, after so many that failed."""
    return min(BACK_OFF * 2 ** min(failed - 1, 16), MOST_BACK_OFF) if failed else timedelta()


def belongs(thing: Object, owner: Object) -> bool:
    """Whether the pod is this Job's, or the Job this Tenant's, and not one's that had its name before."""
    owners = thing["metadata"].get("ownerReferences") or ()
    return any(each["uid"] == owner["metadata"]["uid"] for each in owners)


def resizable(pod: Object) -> bool:
    """Whether the pod's kubelet can change its CPU in place: one that can reports what its containers have."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return bool(statuses) and all("resources" in each for each in statuses) and not resize_refused(pod)


def resize_refused(pod: Object) -> bool:
    """Whether the kubelet will not give the pod the size that it is asked for, as with a static CPU manager."""
    told = (pod.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "PodResizePending" and each.get("reason") == "Infeasible" for each in told)


def cores_of(pod: Object) -> int:
    """Whole cores of a tenant's pod: what it asks for, or what it has where that was refused and the kubelet tells."""
    (told, *_) = (pod.get("status") or {}).get("containerStatuses") or ({},)
    holder = told if resize_refused(pod) and "resources" in told else pod["spec"]["containers"][0]
    return cpu_request(holder) // 1000


def placement_of(job: Object | None, pods: list[Object]) -> Placement | None:
    """Where a released Job is: its annotations say, and a pod that was resized knows better how many cores it has."""
    if job is None or "deletionTimestamp" in job["metadata"] or outcome_of(job):
        return None
    if job["spec"].get("suspend") and not queued(job):
        return None
    annotations = job["metadata"].get("annotations") or {}
    node, cores = annotations.get(NODE_ANNOTATION), annotations.get(CORES_ANNOTATION, "")
    if not node or not _CORES.fullmatch(cores):  # anybody who may change Jobs may change these
        return None
    return Placement(node, max(map(cores_of, pods), default=0) or int(cores))


def queued(job: Object) -> bool:
    """Whether Kueue says when the Job runs; its node was decided before."""
    return QUEUE_LABEL in (job["metadata"].get("labels") or {})


def outcome_of(job: Object | None) -> Outcome | None:
    """How a Job ended; None while it has not."""
    if job is None:
        return None
    if condition(job, "Complete"):
        return Outcome.SUCCEEDED
    return Outcome.FAILED if condition(job, "Failed") else None


def _recorded_outcome(status: Object) -> Outcome | None:
    """What the Tenant's own status says: its Job may have been removed since."""
    phase = status.get("phase")
    return Outcome(phase) if phase in ENDED else None


def _is_time_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


def _deadline(text: str | None) -> tuple[datetime | None, str]:
    """A deadline, or why it is none: the API server takes leap seconds, offsets of 99 hours and the year 0."""
    try:
        return instant(text), ""
    except ValueError as error:
        return None, f"spec.deadline is {text!r}: {error}"


def _objectives(guard: Object | None) -> Objectives | None:
    if guard is None:
        return None
    ttft, tpot = guard.get("ttftP99Milliseconds"), guard.get("tpotP99Milliseconds")
    return Objectives(
        ttft=None if ttft is None else ttft / 1000,
        tpot=None if tpot is None else tpot / 1000,
        window=guard.get("windowSeconds", 60),
        recovery=guard.get("recoveryPercent", 80) / 100,
        restore_after=guard.get("restoreAfterSeconds", 120),
    )


def _window(window: Object) -> Window:
    days = frozenset(DAYS.index(day) for day in window.get("days") or ())
    return Window(days or ALL_DAYS, time.fromisoformat(window["start"]), time.fromisoformat(window["end"]))
