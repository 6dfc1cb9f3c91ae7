"""blink.v1.Inference: Generate and Abort."""

from __future__ import annotations

import grpc
from blink.v1 import inference_pb2 as pb

from services.dpu_gateway.errors import FieldError, GatewayError
from services.dpu_gateway.generation import Generations
from services.dpu_gateway.peers import Peers, is_forwarded
from services.dpu_gateway.wire import lenient_parser

SERVICE = "blink.v1.Inference"

GenerateContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
AbortContext = grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]


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
            await self._generations.run(message, context.write)
        except GatewayError as error:
            await context.abort(error.code, str(error), error.trailing_metadata())

    async def abort(self, message: pb.AbortRequest | FieldError, context: AbortContext) -> pb.AbortResponse:
        if isinstance(message, FieldError):
            await context.abort(message.code, str(message), message.trailing_metadata())
        session = self._generations.link.session
        found = session is not None and session.abort(message.request_id)
        if not is_forwarded(context):  # also when found here: ids are unique in one worker only
            found |= await self._peers.abort(message.request_id)
        return pb.AbortResponse(found=found)
