"""blink.v1.Inference: Generate and Abort."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from blink.v1 import inference_pb2 as pb

from services.dpu_gateway.access.callers import Caller
from services.dpu_gateway.errors import FieldError, GatewayError, UnauthenticatedError
from services.dpu_gateway.generation import Generations
from services.dpu_gateway.peers import Peers, forwarded_for
from services.dpu_gateway.streams import RequestName
from services.dpu_gateway.tracing import NO_TRACE, TRACEPARENT, TRACESTATE, Trace
from services.dpu_gateway.wire import lenient_parser

SERVICE = "blink.v1.Inference"

GenerateContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
AbortContext = grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]


def authorization(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """The call's ``authorization`` metadata."""
    return _metadata(context, "authorization")


def trace_of(context: grpc.aio.ServicerContext[Any, Any]) -> Trace:
    """The trace that the call belongs to."""
    parent = _metadata(context, TRACEPARENT)
    return Trace(parent, _metadata(context, TRACESTATE) or "") if parent else NO_TRACE


def _metadata(context: grpc.aio.ServicerContext[Any, Any], name: str) -> str | None:
    found = (value for key, value in context.invocation_metadata() or () if key == name)
    value = next(found, None)
    return value.decode(errors="replace") if isinstance(value, bytes) else value


async def require_caller(generations: Generations, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
    """Who calls; ends the call with UNAUTHENTICATED when that is not known."""
    try:
        return generations.identify(authorization(context))
    except UnauthenticatedError as error:
        await context.abort(error.code, str(error), error.trailing_metadata())


async def end_with(error: GatewayError, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Answer with the error's status. Does not return."""
    try:
        await context.abort(error.code, str(error), error.trailing_metadata())
    except grpc.aio.InternalError:  # nothing can follow a first message for which the client makes no room
        raise asyncio.CancelledError from None


class InferenceService:
    def __init__(self, generations: Generations, peers: Peers) -> None:
        self._generations = generations
        self._peers = peers

    def handler(self) -> grpc.GenericRpcHandler:
        """What the server routes to; unlike the generated one it answers malformed messages with INVALID_ARGUMENT."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self.generate, lenient_parser(pb.GenerateRequest), pb.GenerateResponse.SerializeToString
                ),
                "Abort": grpc.unary_unary_rpc_method_handler(
                    self.abort, lenient_parser(pb.AbortRequest), pb.AbortResponse.SerializeToString
                ),
            },
        )

    async def generate(self, message: pb.GenerateRequest | FieldError, context: GenerateContext) -> None:
        try:
            caller = self._generations.identify(authorization(context))
            await self._generations.run(message, caller, context.write, trace_of(context))
        except GatewayError as error:
            await end_with(error, context)

    async def abort(self, message: pb.AbortRequest | FieldError, context: AbortContext) -> pb.AbortResponse:
        if isinstance(message, FieldError):
            await context.abort(message.code, str(message), message.trailing_metadata())
        owner = forwarded_for(context)
        by_peer = owner is not None
        if owner is None:
            owner = (await require_caller(self._generations, context)).name
        name = RequestName(owner, message.request_id)
        session = self._generations.link.session
        found = session is not None and session.abort(name)
        if not by_peer:  # also when found here: ids are unique in one worker only
            found |= await self._peers.abort(name)
        return pb.AbortResponse(found=found)
