"""vllm.grpc.engine.VllmEngine; gRPC answers UNIMPLEMENTED for what is not here: embeddings, profiles, cache events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import grpc
from blink.v1 import inference_pb2 as pb
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from services.dpu_gateway.choices import named, repeated, run_together
from services.dpu_gateway.errors import FieldError, GatewayError, UnavailableError
from services.dpu_gateway.generation import Generations
from services.dpu_gateway.metrics.engine import EngineFigures
from services.dpu_gateway.model import Model
from services.dpu_gateway.peers import Peers
from services.dpu_gateway.service import end_with, require_caller, trace_of
from services.dpu_gateway.streams import RequestName
from services.dpu_gateway.vllm_engine.tokenizer_files import chunks, zipped
from services.dpu_gateway.vllm_engine.translate import Choice, to_blink
from services.dpu_gateway.wire import lenient_parser

SERVICE = "vllm.grpc.engine.VllmEngine"
SERVER_TYPE = "vllm-grpc"  # the dialect, which routers recognize

Context = grpc.aio.ServicerContext[Any, Any]
Method = Callable[[Any, Context], Awaitable[Any]]


class VllmEngineService:
    """The same core and the same keys as every other protocol."""

    def __init__(self, generations: Generations, peers: Peers, retry_after: float) -> None:
        self._generations = generations
        self._peers = peers
        self._retry_after = retry_after
        self._started = time.monotonic()
        self._choices: dict[RequestName, int] = {}  # how many the running requests have, where that is not one

    def handler(self) -> grpc.GenericRpcHandler:
        unary = {
            "HealthCheck": (self.health_check, vllm.HealthCheckRequest),
            "Abort": (self.abort, vllm.AbortRequest),
            "FlushCache": (self.flush_cache, common_pb2.FlushCacheRequest),
            "GetModelInfo": (self.get_model_info, vllm.GetModelInfoRequest),
            "GetServerInfo": (self.get_server_info, vllm.GetServerInfoRequest),
            "GetLoads": (self.get_loads, vllm.GetLoadsRequest),
        }
        streams = {
            "Generate": (self.generate, vllm.GenerateRequest),
            "GetTokenizer": (self.get_tokenizer, common_pb2.GetTokenizerRequest),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(_guarded(method), lenient_parser(request), _serialize)
            for name, (method, request) in unary.items()
        }
        handlers |= {
            name: grpc.unary_stream_rpc_method_handler(_guarded(method), lenient_parser(request), _serialize)
            for name, (method, request) in streams.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        caller = await require_caller(self._generations, context)
        name = RequestName(caller.name, request.request_id)
        try:
            messages = to_blink(request)
            if len(messages) > 1:
                self._choices[name] = len(messages)
            trace, writing = trace_of(context), asyncio.Lock()  # choices write one at a time

            async def run(choice: Choice, message: pb.GenerateRequest) -> None:
                async def write(event: pb.GenerateResponse) -> None:
                    response = choice.take(event)
                    if response is not None and (request.stream or response.HasField("complete")):
                        async with writing:
                            await context.write(response)

                await self._generations.run(message, caller, write, trace)

            stops = request.sampling_params.stop_token_ids
            await run_together([run(Choice(index, stops), message) for index, message in enumerate(messages)])
        except GatewayError as error:
            await end_with(error, context)
        finally:
            self._choices.pop(name, None)

    async def abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        owner = (await require_caller(self._generations, context)).name
        session = self._generations.link.session
        for request_id in request.request_ids:
            count = self._choices.get(RequestName(owner, request_id), 1)
            for message in named(repeated(pb.GenerateRequest(), count), request_id):
                name = RequestName(owner, message.request_id)
                if session is None or not session.abort(name):
                    await self._peers.abort(name)
        return vllm.AbortResponse()

    async def flush_cache(self, request: Any, context: Context) -> common_pb2.FlushCacheResponse:
        await require_caller(self._generations, context)
        return common_pb2.FlushCacheResponse(success=False, message="the prefix cache can't be emptied while serving")

    async def health_check(self, request: Any, context: Context) -> vllm.HealthCheckResponse:
        try:
            healthy = self._generations.require_session().liveness.serving
        except UnavailableError as error:
            return vllm.HealthCheckResponse(healthy=False, message=str(error))
        return vllm.HealthCheckResponse(healthy=healthy, message="" if healthy else "the engine makes no progress")

    async def get_model_info(self, request: Any, context: Context) -> vllm.GetModelInfoResponse:
        model = await self._model(context)
        card, limits = model.card, model.limits
        return vllm.GetModelInfoResponse(
            model_path=card.name,
            served_model_name=card.name,
            tokenizer_path=card.name,
            is_generation=True,
            max_context_length=limits.max_context_tokens,
            max_req_input_len=limits.max_context_tokens - 1,
            vocab_size=limits.vocabulary_size,
            model_type=card.architecture,
            architectures=[card.architecture],
            eos_token_ids=card.eos_token_ids,
        )

    async def get_tokenizer(self, request: Any, context: Context) -> None:
        model = await self._model(context)
        for chunk in chunks(await asyncio.to_thread(zipped, model.card)):
            await context.write(chunk)

    async def get_server_info(self, request: Any, context: Context) -> vllm.GetServerInfoResponse:
        await require_caller(self._generations, context)
        session = self._generations.link.session
        return vllm.GetServerInfoResponse(
            active_requests=self._generations.open_streams,
            is_paused=self._generations.draining,
            uptime_seconds=time.monotonic() - self._started,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            max_num_seqs=0 if session is None else session.geometry.slots_per_lane,
        )

    async def get_loads(self, request: Any, context: Context) -> vllm.GetLoadsResponse:
        await require_caller(self._generations, context)
        loads = []
        status = (await EngineFigures.take(self._generations.link.session)).status
        if status is not None:
            counters = status.counters
            running, waiting, pages = (int(counters[name]) for name in ("running", "waiting", "kv_pages_total"))
            used = (pages - int(counters["kv_pages_free"])) / pages if pages else 0.0
            loads.append(
                vllm.SchedulerLoad(
                    num_running_reqs=running,
                    num_waiting_reqs=waiting,
                    num_total_reqs=running + waiting,
                    token_usage=used,
                    utilization=used,
                )
            )
        now = datetime.now(UTC).isoformat()
        return vllm.GetLoadsResponse(timestamp=now, version=version("blink"), dp_rank_count=1, loads=loads)

    async def _model(self, context: Context) -> Model:
        await require_caller(self._generations, context)
        model = self._generations.link.model
        if model is None:
            error = UnavailableError("no model is known yet: no engine was attached", self._retry_after)
            await context.abort(error.code, str(error), error.trailing_metadata())
        return model


def _guarded(method: Method) -> Method:
    """``method`` for messages that could be read; the others end with INVALID_ARGUMENT, which gRPC would not say."""

    async def call(request: Any, context: Context) -> Any:
        if isinstance(request, FieldError):
            await context.abort(request.code, str(request), request.trailing_metadata())
        return await method(request, context)

    return call


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
