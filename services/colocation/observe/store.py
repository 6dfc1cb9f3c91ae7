"""The latest state of every object that decisions depend on, fed by watches.

Pods are kept as the few figures that count, so that a large cluster fits into little memory and a decision does not
parse quantities again and again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeVar

from services.colocation.decision.model import START_LIMIT, Cluster, Key, Reading
from services.colocation.names import (
    COMPONENT_LABEL,
    PART_OF,
    PART_OF_LABEL,
    POOLS,
    SERVING_COMPONENTS,
    TENANT_LABEL,
    TENANTS,
)
from services.colocation.observe.objects import ENDED, Object, belongs, condition, node_of, pool_of, tenant_of
from services.colocation.observe.quantities import cpu_request, pod_millicores

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class _Pod:
    node: str
    millicores: int
    serving: bool
    version: int = field(compare=False)


@dataclass
class Store:
    """What watches have shown."""

    nodes: dict[str, Object] = field(default_factory=dict)
    pools: dict[str, Object] = field(default_factory=dict)
    tenants: dict[Key, Object] = field(default_factory=dict)
    jobs: dict[Key, Object] = field(default_factory=dict)
    _pods: dict[Key, _Pod] = field(default_factory=dict)
    _serving: Counter[str] = field(default_factory=Counter)  # millicores by node
    _others: Counter[str] = field(default_factory=Counter)
    _tenant_pods: dict[Key, dict[str, Object]] = field(default_factory=lambda: defaultdict(dict))

    def set_node(self, node: Object, gone: bool) -> bool:
        """Take in a Node. Returns, as all setters do, whether decisions may depend on what changed."""
        name = node["metadata"]["name"]
        before = self.nodes.get(name)
        if not _set(self.nodes, name, node, gone):
            return False
        return gone or before is None or _of_interest(before) != _of_interest(node)

    def set_pool(self, pool: Object, gone: bool) -> bool:
        return _set(self.pools, pool["metadata"]["name"], pool, gone)

    def set_tenant(self, tenant: Object, gone: bool) -> bool:
        return _set(self.tenants, _key(tenant), tenant, gone)

    def set_job(self, job: Object, gone: bool) -> bool:
        if TENANT_LABEL not in (job["metadata"].get("labels") or {}):
            return False
        return _set(self.jobs, _key(job), job, gone)

    def set_pod(self, pod: Object, gone: bool) -> bool:
        """A pod that is no tenant's is kept as what it holds of its node."""
        key = _key(pod)
        owner = (pod["metadata"].get("labels") or {}).get(TENANT_LABEL)
        gone = gone or (pod.get("status") or {}).get("phase") in ENDED
        if owner is not None:
            return self._set_tenant_pod(Key(key.namespace, owner), pod, gone)
        before = self._pods.get(key)
        # Also of an end: events of one object come in order, those of two that had one name need not.
        known = -1 if before is None else before.version
        if _version(pod) < known or (_version(pod) == known and not gone):
            return False
        now = None if gone else _weigh(pod)
        self._pods.pop(key, None)
        self._count(before, -1)
        self._count(now, 1)
        if now is not None:
            self._pods[key] = now
        return now != before

    def _set_tenant_pod(self, owner: Key, pod: Object, gone: bool) -> bool:
        name = pod["metadata"]["name"]
        if gone:
            self._forget_tenant_pod(owner, name)
            return True
        pods = self._tenant_pods[owner]
        if not _newer(pod, pods.get(name)):
            return False
        pods[name] = pod
        return True

    def _forget_tenant_pod(self, owner: Key, name: str) -> None:
        """With the tenant's entry, where it was the last: every decision goes through all of them."""
        pods = self._tenant_pods.get(owner, {})
        pods.pop(name, None)
        if not pods:
            self._tenant_pods.pop(owner, None)

    def job_of(self, key: Key) -> Object | None:
        """The Job that the operator made for this Tenant; another of its name is not touched."""
        tenant, job = self.tenants.get(key), self.jobs.get(key)
        return job if tenant is not None and job is not None and belongs(job, tenant) else None

    def pods_of(self, key: Key) -> Iterable[Object]:
        """A tenant's pods that have not ended."""
        return self._tenant_pods[key].values() if key in self._tenant_pods else ()

    def retain(self, plural: str, present: Collection[Key], version: int) -> int:
        """Of this kind ``present`` is all there was at ``version``: what is no newer and not there has gone unseen.

        Returns how many have.
        """
        gone = [
            (key, thing)
            for key, thing in self._all(plural)
            if key not in present and (thing.version if isinstance(thing, _Pod) else _version(thing)) <= version
        ]
        for key, thing in gone:
            if isinstance(thing, _Pod):
                self._count(self._pods.pop(key), -1)
            elif plural == "pods":
                self._forget_tenant_pod(Key(key.namespace, thing["metadata"]["labels"][TENANT_LABEL]), key.name)
            elif plural in {"nodes", POOLS}:
                del (self.nodes if plural == "nodes" else self.pools)[key.name]
            else:
                del (self.tenants if plural == TENANTS else self.jobs)[key]
        return len(gone)

    def _all(self, plural: str) -> list[tuple[Key, Object | _Pod]]:
        if plural in {"nodes", POOLS}:
            clusterwide = self.nodes if plural == "nodes" else self.pools
            return [(Key("", name), thing) for name, thing in clusterwide.items()]
        if plural == "pods":
            tenants = [(_key(pod), pod) for pods in self._tenant_pods.values() for pod in pods.values()]
            return [*self._pods.items(), *tenants]
        return [*(self.tenants if plural == TENANTS else self.jobs).items()]

    def cluster(
        self,
        now: datetime,
        readings: dict[str, Reading | None],
        resizable: bool,
        start_limit: timedelta = START_LIMIT,
    ) -> Cluster:
        """This moment, for a decision."""
        tenants = tuple(
            tenant_of(thing, self.job_of(key), self.pods_of(key))
            for key, thing in self.tenants.items()
            if "deletionTimestamp" not in thing["metadata"]
        )
        leaving, beside = self._held({each.key for each in tenants if each.placement is not None})
        nodes = tuple(
            node_of(node, self._serving[name], self._others[name] + beside[name], leaving[name])
            for name, node in self.nodes.items()
        )
        pools = tuple(pool_of(thing, readings.get(name)) for name, thing in self.pools.items())
        return Cluster(now, nodes, pools, tenants, resizable, start_limit)

    def _held(self, placed: set[Key]) -> tuple[Counter[str], Counter[str]]:
        """Millicores by node of tenants' pods that are to end, and what all others hold beside their grants.

        To end are those told so, and those whose Job is no longer released. A grant is for the first container: a
        runtime class has an overhead, and what admission adds to a pod counts, too.
        """
        leaving: Counter[str] = Counter()
        beside: Counter[str] = Counter()
        for key, pods in self._tenant_pods.items():
            job = self.job_of(key) if key in placed else None
            for pod in pods.values():
                spec = pod.get("spec") or {}
                node = spec.get("nodeName")
                if node and (job is None or "deletionTimestamp" in pod["metadata"] or not belongs(pod, job)):
                    leaving[node] += pod_millicores(pod)
                elif node:
                    beside[node] += _beside(spec)
        return leaving, beside

    def _count(self, pod: _Pod | None, sign: int) -> None:
        if pod is not None:
            (self._serving if pod.serving else self._others)[pod.node] += sign * pod.millicores


def _weigh(pod: Object) -> _Pod | None:
    node = (pod.get("spec") or {}).get("nodeName")
    if not node:
        return None
    labels = pod["metadata"].get("labels") or {}
    serving = labels.get(PART_OF_LABEL) == PART_OF and labels.get(COMPONENT_LABEL) in SERVING_COMPONENTS
    return _Pod(node, pod_millicores(pod), serving, _version(pod))


def _beside(spec: Object) -> int:
    """Millicores that a pod holds beside its first container: mostly none, which is seen without any parsing."""
    if len(spec["containers"]) == 1 and not any(spec.get(each) for each in ("initContainers", "overhead", "resources")):
        return 0
    return pod_millicores({"spec": spec}) - cpu_request(spec["containers"][0])


def _key(thing: Object) -> Key:
    return Key(thing["metadata"]["namespace"], thing["metadata"]["name"])


def _set(into: dict[K, Object], key: K, thing: Object, gone: bool) -> bool:
    before = into.get(key)
    if gone:
        # A watch may tell late of an object that has been replaced by one of the same name.
        if before is not None and before["metadata"].get("uid") == thing["metadata"].get("uid"):
            del into[key]
            return True
        return False
    if not _newer(thing, before):
        return False
    into[key] = thing
    return True


def _newer(thing: Object, before: Object | None) -> bool:
    """Whether ``thing`` is no older than what is known: watches lag behind answers to writes."""
    if before is None:
        return True
    return _version(thing) > _version(before)


def _version(thing: Object) -> int:
    return int(thing["metadata"].get("resourceVersion", 0))


def _of_interest(node: Object) -> tuple[object, ...]:
    """What decisions depend on: a kubelet reports every few seconds, and most of it is heartbeat."""
    allocatable = (node.get("status") or {}).get("allocatable")
    return node["metadata"].get("labels"), node.get("spec"), condition(node, "Ready"), allocatable
