"""Figures that the engine keeps in the ring's header, in Prometheus's form. Reading them costs the engine nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from services.dpu_gateway.session import Session
from services.ring.errors import RingError
from services.ring.header import RingStatus
from services.ring.schema import EngineState, FinishReason, LanePhase

NOT_AN_END = FinishReason.NONE
UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One look at the engine; all but the state is absent while none is attached."""

    state: str
    model: str = ""
    heartbeat_age: float = 0.0
    log_entries: int = 0
    slots_per_lane: int = 0
    status: RingStatus | None = None

    @classmethod
    async def take(cls, session: Session | None) -> Self:
        """One bulk read of the header. Call it in the event loop, which owns the session."""
        if session is None:
            return cls(UNREACHABLE)
        try:
            status = await session.read_status()
        except RingError:
            return cls(UNREACHABLE)
        state = session.liveness.state
        return cls(
            state=UNREACHABLE if state is None else state.name.lower(),
            model=session.model.card.name,
            heartbeat_age=session.liveness.heartbeat_age,
            log_entries=session.geometry.log_entries,
            slots_per_lane=session.geometry.slots_per_lane,
            status=status,
        )

    def collect(self) -> Iterator[Metric]:
        """A gauge of each state, and where there is an engine all of its counters."""
        states = GaugeMetricFamily(
            "blink_engine_state", "1 for the state that the engine is in, 0 for every other.", labels=["state"]
        )
        for name in (*(state.name.lower() for state in EngineState), UNREACHABLE):
            states.add_metric([name], float(name == self.state))
        yield states
        if self.status is None:
            return
        yield GaugeMetricFamily(
            "blink_engine_heartbeat_age_seconds",
            "Since the engine's heartbeat was last seen to move.",
            self.heartbeat_age,
        )
        yield from self._engine(self.status)
        yield from self._lanes(self.status)

    def _engine(self, status: RingStatus) -> Iterator[Metric]:
        engine, counters = status.engine, status.counters
        pages = int(counters["kv_pages_total"])
        used = pages - int(counters["kv_pages_free"])
        for name, text, value in (
            ("num_requests_running", "Requests that the engine has admitted to its batch.", counters["running"]),
            ("num_requests_waiting", "Requests in the engine's queue.", counters["waiting"]),
            ("kv_cache_usage_perc", "Share of the KV cache's pages in use; 1 is all.", used / pages if pages else 0.0),
            ("kv_cache_pages", "Pages of the KV cache.", pages),
        ):
            gauge = GaugeMetricFamily(f"blink_{name}", text, labels=["model_name"])
            gauge.add_metric([self.model], float(value))
            yield gauge
        for name, text, value in (
            ("num_preemptions", "Requests sent back to the queue for want of pages.", counters["preemptions"]),
            ("prompt_tokens", "Prompt tokens computed, recomputed ones not counted twice.", counters["prompt_tokens"]),
            ("generation_tokens", "Tokens generated.", counters["generated_tokens"]),
            (
                "prefix_cache_queries",
                "Prompt tokens looked for in the prefix cache, once a request.",
                counters["prefix_cache_queries"],
            ),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", counters["prefix_cache_hits"]),
            ("engine_steps", "Forward passes.", engine["steps"]),
            ("engine_step_seconds", "Time spent in forward passes.", int(counters["step_time_us"]) / 1e6),
        ):
            counter = CounterMetricFamily(f"blink_{name}", text, labels=["model_name"])
            counter.add_metric([self.model], float(value))
            yield counter
        ends = CounterMetricFamily(
            "blink_engine_requests_finished",
            "Requests that the engine ended, by reason.",
            labels=["model_name", "reason"],
        )
        for reason in FinishReason:
            if reason is not NOT_AN_END:
                ends.add_metric([self.model, reason.name.lower()], float(counters["finished"][reason]))
        yield ends

    def _lanes(self, status: RingStatus) -> Iterator[Metric]:
        lanes = status.lanes
        yield GaugeMetricFamily("blink_lane_slots", "Slots of each lane of the ring.", self.slots_per_lane)
        yield GaugeMetricFamily("blink_lane_log_entries", "Entries that each lane's token log holds.", self.log_entries)
        for name, text, values in (
            ("attached", "1 while a gateway worker owns the lane.", lanes["phase"] == LanePhase.ATTACHED),
            ("requests_running", "Requests of the lane in the engine's batch.", lanes["running"]),
            ("requests_waiting", "Requests of the lane in the engine's queue.", lanes["waiting"]),
            ("log_backlog", "Log entries that the gateway has not acknowledged.", lanes["log_backlog"]),
        ):
            gauge = GaugeMetricFamily(f"blink_lane_{name}", text, labels=["lane"])
            for lane, value in enumerate(values.tolist()):
                gauge.add_metric([str(lane)], float(value))
            yield gauge
        for name, text, values in (
            ("rejected", "Submissions of the lane that the engine refused.", lanes["rejected"]),
            ("generation_tokens", "Tokens generated for the lane.", lanes["generated_tokens"]),
        ):
            counter = CounterMetricFamily(f"blink_lane_{name}", text, labels=["lane"])
            for lane, value in enumerate(values.tolist()):
                counter.add_metric([str(lane)], float(value))
            yield counter
