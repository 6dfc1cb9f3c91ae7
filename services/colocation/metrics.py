"""The operator's own metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.colocation.decision.actions import Plan
from services.colocation.decision.model import Pool, Stage


class OperatorMetrics:
    """Labels are bounded by the pools there are, never by tenants or nodes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.leading = Gauge("blink_operator_leading", "1 while this replica leads.", registry=self.registry)
        self.reconcile = Histogram(
            "blink_operator_reconcile_seconds",
            "From a look at the cluster to the last write.",
            ("part",),
            registry=self.registry,
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.actions = Counter(
            "blink_operator_actions", "Acts carried out.", ("action", "reason"), registry=self.registry
        )
        self.failures = Counter(
            "blink_operator_failures", "Calls that failed, to be tried again.", ("action",), registry=self.registry
        )
        self._freed = self._of_pool("freed_cores", "Cores that serving leaves.")
        self._used = self._of_pool("used_cores", "Cores that tenants have.")
        self._waiting = self._of_pool("waiting_tenants", "Tenants that wait.")
        self._nodes = self._of_pool("nodes", "Nodes that it has.")
        self._conflicts = self._of_pool("conflicting_nodes", "Nodes that it selects and an older pool has.")
        self._stage = self._of_pool("guard_stage", "0 Normal, 1 Shrink, 2 SuspendHalf, 3 SuspendAll, 4 Evict.")
        self._share = Gauge(
            "blink_tenantpool_slo_share",
            "P99 over the window as a share of its limit; above 1 is broken.",
            ("pool", "objective"),
            registry=self.registry,
        )

    def show(self, plan: Plan, pools: tuple[Pool, ...]) -> None:
        """Figures of the last decision; those of pools that are gone go."""
        gauges = (self._freed, self._used, self._waiting, self._nodes, self._conflicts, self._stage)
        for gauge in (*gauges, self._share):
            gauge.clear()
        stages = list(Stage)
        for pool in pools:
            report = plan.pools[pool.name]
            values = (
                sum(report.freed.values()),
                sum(report.used.values()),
                report.waiting,
                len(report.freed),
                len(report.conflicts),
                stages.index(report.guard.stage),
            )
            for gauge, value in zip(gauges, values, strict=True):
                gauge.labels(pool.name).set(value)
            if pool.objectives is None or pool.reading is None:
                continue
            for name in ("ttft", "tpot"):
                seen, limit = getattr(pool.reading, name), getattr(pool.objectives, name)
                if seen is not None and limit is not None:
                    self._share.labels(pool.name, name).set(seen / limit)

    def _of_pool(self, name: str, text: str) -> Gauge:
        return Gauge(f"blink_tenantpool_{name}", text, ("pool",), registry=self.registry)
