"""Several generations of one request: how they differ, what they are called, and that they run and fail together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from blink.v1 import inference_pb2 as pb

from services.dpu_gateway.errors import GatewayError

U64 = 1 << 64
MAX_CHOICES = 128


def repeated(message: pb.GenerateRequest, count: int) -> list[pb.GenerateRequest]:
    """``count`` of the same; a given seed grows by one from choice to choice, so that they differ and repeat."""
    messages = []
    for index in range(count):
        choice = pb.GenerateRequest()
        choice.CopyFrom(message)
        if message.sampling.HasField("seed"):
            choice.sampling.seed = (message.sampling.seed + index) % U64
        messages.append(choice)
    return messages


def named(messages: list[pb.GenerateRequest], request_id: str) -> list[pb.GenerateRequest]:
    """The request's id for one, with the choice's number for several."""
    for index, message in enumerate(messages):
        message.request_id = request_id if len(messages) == 1 else f"{request_id}-{index}"
    return messages


async def run_together(runs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await all; the first failure ends the others. Raises GatewayError."""
    if len(runs) == 1:
        await runs[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(run)
    except* GatewayError as errors:
        raise errors.exceptions[0] from None
