"""First tokens of chats by gRPC and by OpenAI's HTTP API, asked in turns, one request at a time."""

from __future__ import annotations

import asyncio
import json
import time

import numpy as np
from blink.v1 import inference_pb2, inference_pb2_grpc
from numpy.typing import NDArray

PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
MAX_TOKENS = 4


async def in_turns(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    model: str,
    count: int,
) -> NDArray[np.float64]:
    """[count // 2, 2] seconds to the first token, by gRPC and by HTTP.

    ``count`` requests are made by each; those of the first half are not told, as they warm up what answers.
    Raises RuntimeError when one is not answered.
    """
    times = [(await _by_grpc(stub), await _by_http(reader, writer, model)) for _ in range(count)]
    return np.array(times)[count - count // 2 :]


async def _by_grpc(stub: inference_pb2_grpc.InferenceAsyncStub) -> float:
    stop = inference_pb2.StopConditions(max_tokens=MAX_TOKENS, ignore_eos=True)
    request = inference_pb2.GenerateRequest(stop=stop)
    request.chat.messages.add(role="user", content=PROMPT)
    begun, first = time.perf_counter(), 0.0
    async for event in stub.Generate(request):
        if not first and event.HasField("chunk"):
            first = time.perf_counter()
    return _since(begun, first)


async def _by_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str) -> float:
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    begun, first = time.perf_counter(), 0.0
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    if not (line := await reader.readline()).startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"a chat by HTTP was answered with {line!r}")
    while (line := await reader.readline()) not in {b"0\r\n", b""}:  # the end of a chunked answer, or a broken one
        if not first and line.startswith(b"data: ") and b'"content":""' not in line:
            first = time.perf_counter()
    await reader.readline()
    return _since(begun, first)


def _since(begun: float, first: float) -> float:
    if not first:
        raise RuntimeError("a chat was answered without a token")
    return first - begun
