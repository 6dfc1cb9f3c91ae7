"""Figures that gateway workers take of requests: names and meanings are those of vLLM's, ``blink_`` for ``vllm:``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import Metric

from services.dpu_gateway.errors import GatewayError, OverloadedError

disable_created_metrics()  # type: ignore[no-untyped-call]  # shared figures can't tell when a series began

# Seconds. A token takes 3 to 10 ms on one GPU, a first token 5 to 50; the long ends are queues.
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
TOKEN_BUCKETS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
REQUEST_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
LENGTH_BUCKETS = tuple(float(1 << power) for power in range(18))


COMMON_LOSSES = ("ENGINE_LOST", "LANE_LOST", "TRANSPORT_LOST", "RETRY_EXC_ERR")


class End(StrEnum):
    """How an accepted request ended; the values are vLLM's where it has them."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"
    ABORT = "abort"  # Abort was called, or the client went away
    TIME_LIMIT = "time_limit"
    SLOW_READER = "slow_reader"
    SHED = "shed"  # it waited and gave way to one of higher priority
    ERROR = "error"


class WeightedHistogram(Histogram):
    """A histogram that takes several equal observations at the price of one."""

    def observe_many(self, value: float, count: int) -> None:
        self._sum.inc(value * count)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(count)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The figures of one model's requests, bound once so that an observation looks nothing up."""

    first_token: Histogram
    between_tokens: WeightedHistogram
    time_per_token: Histogram
    end_to_end: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    prompt_length: Histogram
    output_length: Histogram
    ends: dict[End, Counter]


class GatewayMetrics:
    """One worker's figures. Where they lie is chosen by ``sharing.share`` before the first is made."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._models: dict[str, ModelMetrics] = {}
        self.rejected = Counter(
            "blink_requests_rejected",
            "Requests refused before they were queued, by what was wrong or what there was too little of.",
            ("reason",),
            registry=self._registry,
        )
        self.open_requests = Gauge(
            "blink_gateway_open_requests",
            "Requests that gateway workers are serving, from arrival to the last byte.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self.open_requests.set(0)  # a killed worker's successor inherits its figures
        self.losses = Counter(
            "blink_engine_losses",
            "Attachments to an engine that were lost, by cause: an RDMA completion's status, or what ended.",
            ("cause",),
            registry=self._registry,
        )
        for cause in COMMON_LOSSES:  # there from the start, so that the first is seen as a change
            self.losses.labels(cause)
        self._first_token = self._seconds(
            "time_to_first_token", "From a request's arrival at the gateway to its first token.", FIRST_TOKEN_BUCKETS
        )
        self._between_tokens = WeightedHistogram(
            "blink_inter_token_latency_seconds",
            "Between a token and the one before it; tokens that come together share the time.",
            ("model_name",),
            registry=self._registry,
            buckets=TOKEN_BUCKETS,
        )
        self._time_per_token = self._seconds(
            "request_time_per_output_token",
            "A request's mean time for each token but its first.",
            TOKEN_BUCKETS,
        )
        self._end_to_end = self._seconds("e2e_request_latency", "From arrival to the end.", REQUEST_BUCKETS)
        self._queue = self._seconds(
            "request_queue_time", "In the engine's queue, as the engine measured it.", REQUEST_BUCKETS
        )
        self._prefill = self._seconds(
            "request_prefill_time", "From the end of queueing to the first token.", REQUEST_BUCKETS
        )
        self._decode = self._seconds("request_decode_time", "From the first token to the last.", REQUEST_BUCKETS)
        self._prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt.", LENGTH_BUCKETS)
        self._output_length = self._histogram(
            "request_generation_tokens", "Tokens generated for a finished request.", LENGTH_BUCKETS
        )
        self._ends = Counter(
            "blink_request_success",
            "Accepted requests that ended, by how; aborted and failed ones too.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )

    def of_model(self, name: str) -> ModelMetrics:
        """The figures that carry this model's name."""
        metrics = self._models.get(name)
        if metrics is None:
            metrics = self._models[name] = ModelMetrics(
                first_token=self._first_token.labels(name),
                between_tokens=self._between_tokens.labels(name),
                time_per_token=self._time_per_token.labels(name),
                end_to_end=self._end_to_end.labels(name),
                queue=self._queue.labels(name),
                prefill=self._prefill.labels(name),
                decode=self._decode.labels(name),
                prompt_length=self._prompt_length.labels(name),
                output_length=self._output_length.labels(name),
                ends={end: self._ends.labels(name, end.value) for end in End},
            )
        return metrics

    def refused(self, error: GatewayError) -> str:
        """A request was refused before it was queued; the reason that is counted."""
        reason = error.cause.value if isinstance(error, OverloadedError) else error.code.name.lower()
        self.rejected.labels(reason).inc()
        return reason

    def collect(self) -> Iterable[Metric]:
        """This worker's own figures."""
        return self._registry.collect()

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._histogram(f"{name}_seconds", text, buckets)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"blink_{name}", text, ("model_name",), registry=self._registry, buckets=buckets)
