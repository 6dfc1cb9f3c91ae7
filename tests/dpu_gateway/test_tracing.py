"""Spans as a collector receives them, by OTLP from a worker process and from the tracer itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import httpx2
import pytest
from blink.v1 import inference_pb2 as pb
from blink.v1 import inference_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from services.common.settings import SettingsError
from services.dpu_gateway.settings import GatewaySettings
from tests.dpu_gateway.harness import LEASE_TIMEOUT_MS, MODEL, collect, gateway, max_tokens, text_request
from tests.dpu_gateway.test_drain import WorkerProcess, worker_process
from tests.support.stand_in_engine import Behaviour

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes what exporters send."""

    spans: list[Span] = field(default_factory=list)

    async def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: object) -> object:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def below(self, parent: Span) -> dict[str, Span]:
        return {span.name: span for span in self.spans if span.parent_span_id == parent.span_id}

    @property
    def requests(self) -> list[Span]:
        return [span for span in self.spans if span.name == "blink.request"]


@asynccontextmanager
async def traced(*flags: str) -> AsyncIterator[tuple[WorkerProcess, Collector]]:
    """A worker that exports to a collector; it has all spans once the worker has ended."""
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    behaviour = Behaviour(tokens_per_second=200, lease_timeout=LEASE_TIMEOUT_MS / 1000)
    async with (
        gateway(behaviour, workers=0) as system,
        worker_process(system, f"--trace-endpoint=http://127.0.0.1:{port}", *flags) as worker,
    ):
        yield worker, collector
    await server.stop(0)


async def stop(worker: WorkerProcess) -> None:
    worker.process.terminate()
    assert await worker.end() == 0


async def by_grpc(worker: WorkerProcess, request: pb.GenerateRequest, *metadata: tuple[str, str]) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return (await collect(stub.Generate(request, metadata=metadata))).code


async def by_http(worker: WorkerProcess, **headers: str) -> None:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{worker.http_port}") as client:
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 4}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200


async def test_a_request_continues_its_callers_trace_by_both_protocols() -> None:
    async with traced() as (worker, collector):
        await by_grpc(worker, text_request(request_id="mine", stop=max_tokens(4)), ("traceparent", SAMPLED))
        await by_http(worker, traceparent=SAMPLED)
        await stop(worker)
    assert len(collector.requests) == 2
    for request in collector.requests:
        assert request.trace_id.hex() == TRACE
        assert request.parent_span_id.hex() == PARENT
        parts = collector.below(request)
        assert set(parts) == {"queue", "prefill", "decode"}
        queue, prefill, decode = (parts[name] for name in ("queue", "prefill", "decode"))
        assert request.start_time_unix_nano == queue.start_time_unix_nano <= queue.end_time_unix_nano
        assert queue.end_time_unix_nano == prefill.start_time_unix_nano < prefill.end_time_unix_nano
        assert prefill.end_time_unix_nano == decode.start_time_unix_nano <= decode.end_time_unix_nano  # = in one chunk
        assert decode.end_time_unix_nano <= request.end_time_unix_nano
        assert request.status.code == Status.STATUS_CODE_UNSET
    values = {pair.key: pair.value for pair in collector.requests[0].attributes}
    assert values["gen_ai.request.id"].string_value == "mine"
    assert values["gen_ai.response.model"].string_value == MODEL
    assert values["gen_ai.usage.output_tokens"].int_value == 4
    assert values["blink.end"].string_value == "length"


async def test_a_caller_that_does_not_sample_is_followed_and_the_ratio_is_for_the_rest() -> None:
    async with traced("--trace-ratio=0") as (worker, collector):
        await by_http(worker)
        await by_http(worker, traceparent=NOT_SAMPLED)
        await by_http(worker, traceparent="nonsense")
        await by_http(worker, traceparent=SAMPLED)
        await stop(worker)
    assert [span.trace_id.hex() for span in collector.requests] == [TRACE]


async def test_refused_requests_are_errors_that_say_why() -> None:
    async with traced() as (worker, collector):
        assert await by_grpc(worker, text_request("")) is grpc.StatusCode.INVALID_ARGUMENT
        await stop(worker)
    (request,) = collector.requests
    assert (request.status.code, request.status.message) == (Status.STATUS_CODE_ERROR, "invalid_argument")
    assert collector.below(request) == {}


async def test_a_collector_that_is_gone_costs_no_request_and_no_stop() -> None:
    behaviour = Behaviour(lease_timeout=LEASE_TIMEOUT_MS / 1000)
    async with (
        gateway(behaviour, workers=0) as system,
        worker_process(system, "--trace-endpoint=http://127.0.0.1:1") as worker,
    ):
        await asyncio.gather(*(by_http(worker, traceparent=SAMPLED) for _ in range(8)))
        await stop(worker)


def test_nothing_of_it_is_imported_while_it_is_off() -> None:
    program = """
import sys
import services.dpu_gateway.worker
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("flags", [["--trace-endpoint=collector:4317"], ["--trace-ratio=2"]])
def test_bad_settings_are_refused(flags: list[str]) -> None:
    with pytest.raises(SettingsError, match="trace_"):
        GatewaySettings.load(flags)
