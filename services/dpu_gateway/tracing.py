"""OpenTelemetry spans of requests. Off unless an endpoint is set, and then nothing of OpenTelemetry is even imported.

Spans are made when a request has ended, out of the times that metrics take anyway, so until then a traced stream costs
no more than another; they are exported from a thread of their own. Attributes are those of the semantic conventions
for generative AI, and those of vLLM where these have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Trace:
    """W3C trace context as a call brought it; empty where it brought none."""

    parent: str = ""
    state: str = ""


NO_TRACE = Trace()


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One ended request. Times are seconds since the epoch; 0 for what it did not come to."""

    request_id: str
    model: str
    arrived: float
    admitted: float  # queueing ended
    first_token: float
    last_token: float
    ended: float
    prompt_tokens: int
    generated_tokens: int
    end: str  # finished_reason of the metrics, or why the request was refused
    failed: bool


class SpanTracer:
    """Spans ``blink.request`` and, below it, ``queue``, ``prefill`` and ``decode``.

    A sampled parent is always followed, one that is not never; requests without a parent are sampled by ``ratio``.
    """

    def __init__(self, exporter: SpanExporter, instance: str, ratio: float) -> None:
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - costs nothing when tracing is off
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        resource = Resource.create({"service.name": "blink-gateway", "service.instance.id": instance})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)), resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("blink")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, times: RequestTimes, trace: Trace) -> None:
        """Make an ended request's spans; never blocks."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context  # noqa: PLC0415

        context = self._propagator.extract({TRACEPARENT: trace.parent, TRACESTATE: trace.state})
        span = self._tracer.start_span(
            "blink.request", context, SpanKind.SERVER, _attributes(times), start_time=int(times.arrived * NS)
        )
        if span.is_recording():
            if times.failed:
                span.set_status(StatusCode.ERROR, times.end)
            inside = set_span_in_context(span)
            marks = (times.arrived, times.admitted, times.first_token, times.last_token)
            for name, begin, end in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
                if not end:
                    break
                child = self._tracer.start_span(name, inside, start_time=int(begin * NS))
                child.end(int(end * NS))
        span.end(int(times.ended * NS))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def otlp_tracer(endpoint: str, instance: str, ratio: float) -> SpanTracer:
    """Exports by gRPC to a collector at ``http://host:4317``, or ``https://`` with the system's authorities."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    return SpanTracer(OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://")), instance, ratio)


def _attributes(times: RequestTimes) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.id": times.request_id,
        "gen_ai.usage.input_tokens": times.prompt_tokens,
        "gen_ai.usage.output_tokens": times.generated_tokens,
        "gen_ai.latency.e2e": times.ended - times.arrived,
        "blink.end": times.end,
    }
    if times.model:
        attributes["gen_ai.response.model"] = times.model
    if times.admitted:
        attributes["gen_ai.latency.time_in_queue"] = times.admitted - times.arrived
    if times.first_token:
        attributes["gen_ai.latency.time_to_first_token"] = times.first_token - times.arrived
    return attributes
