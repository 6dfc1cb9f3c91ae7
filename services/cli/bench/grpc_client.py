"""Load by blink.v1."""

from __future__ import annotations

import itertools
import time

import grpc
from blink.v1 import inference_pb2 as pb
from blink.v1 import inference_pb2_grpc

from services.cli.bench.kinds import Prompts
from services.cli.bench.outcome import Outcome
from services.cli.bench.prompts import make_ids, make_text
from services.cli.bench.target import Target
from services.cli.bench.workload import Request
from services.cli.channel import open_aio_channel, with_key

CONNECTIONS = 8  # a process: workers of a gateway share a port, so that each connection reaches another one


class GrpcClient:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._channels = [open_aio_channel(target.address) for _ in range(CONNECTIONS)]
        self._stubs = itertools.cycle([inference_pb2_grpc.InferenceStub(channel) for channel in self._channels])
        self._metadata = with_key(target.api_key)

    def prepare(self, request: Request) -> pb.GenerateRequest:
        message = pb.GenerateRequest()
        if self._target.prompts is Prompts.IDS and request.prompt is None:
            message.token_ids.ids.extend(make_ids(request, self._target.vocabulary))
        else:
            message.text = make_text(request)
        message.sampling.temperature = self._target.temperature
        message.stop.max_tokens = request.output_tokens
        message.stop.ignore_eos = self._target.ignore_eos
        return message

    async def ask(self, prepared: pb.GenerateRequest, outcome: Outcome) -> None:
        stub = next(self._stubs)
        finished = False
        outcome.sent = time.monotonic()
        try:
            async for event in stub.Generate(prepared, timeout=self._target.timeout, metadata=self._metadata):
                if event.HasField("chunk"):
                    outcome.arrivals.append(time.monotonic())
                    outcome.output_tokens += len(event.chunk.token_ids)
                elif event.HasField("accepted"):
                    outcome.prompt_tokens = event.accepted.prompt_tokens
                else:
                    finished = True
            if not finished:
                outcome.error = "the stream ended without finished"
        except grpc.aio.AioRpcError as error:
            outcome.error = error.code().name
        outcome.ended = time.monotonic()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
