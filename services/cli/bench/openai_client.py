"""Load by OpenAI's API, streamed: vLLM, SGLang, Blink and whoever else speaks it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import aiohttp
from pydantic_core import from_json, to_json

from services.cli.bench.kinds import Prompts, Protocol
from services.cli.bench.outcome import Outcome
from services.cli.bench.prompts import make_ids, make_text
from services.cli.bench.target import Target
from services.cli.bench.workload import Request

PATHS = {Protocol.COMPLETIONS: "completions", Protocol.CHAT: "chat/completions"}
READ_BYTES = 1 << 16


class OpenAiClient:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._url = f"{target.address}/{PATHS[target.protocol]}"
        headers = {"content-type": "application/json"}
        if target.api_key:
            headers["authorization"] = f"Bearer {target.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # arrivals wait for nobody
            timeout=aiohttp.ClientTimeout(total=target.timeout),
            headers=headers,
            read_bufsize=READ_BYTES,
            auto_decompress=False,
        )

    def prepare(self, request: Request) -> bytes:
        target = self._target
        body: dict[str, Any] = {
            "model": target.model,
            "max_tokens": request.output_tokens,
            "temperature": target.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.ignore_eos:
            body["ignore_eos"] = True
        if target.protocol is Protocol.CHAT:
            body["messages"] = [{"role": "user", "content": make_text(request)}]
        elif target.prompts is Prompts.IDS and request.prompt is None:
            body["prompt"] = make_ids(request, target.vocabulary)
        else:
            body["prompt"] = make_text(request)
        return to_json(body)

    async def ask(self, prepared: bytes, outcome: Outcome) -> None:
        stream = _Stream(outcome)
        outcome.sent = time.monotonic()
        try:
            async with self._session.post(self._url, data=prepared) as response:
                if response.status != 200:
                    outcome.error = f"HTTP {response.status}"
                else:
                    async for data in response.content.iter_any():
                        stream.take(data, time.monotonic())
                    outcome.error = stream.error
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            outcome.error = type(error).__name__
        outcome.ended = time.monotonic()

    async def close(self) -> None:
        await self._session.close()


class _Stream:
    """Server-sent events, in whatever pieces they come."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._rest = b""
        self._done = False
        self._failure = ""

    @property
    def error(self) -> str:
        """Why the stream that has ended is no whole answer; empty when it is one."""
        return self._failure or ("" if self._done else "the stream ended without [DONE]")

    def take(self, data: bytes, now: float) -> None:
        arrived = False
        for event in self._events(data):
            if event == b"[DONE]":
                self._done = True
                continue
            values = from_json(event)
            if "error" in values:
                self._failure = "error in the stream"
                continue
            arrived |= any(_has_tokens(choice) for choice in values.get("choices", ()))
            if usage := values.get("usage"):
                self._outcome.prompt_tokens = usage["prompt_tokens"]
                self._outcome.output_tokens = usage["completion_tokens"]
        if arrived:
            self._outcome.arrivals.append(now)

    def _events(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Neither a chat's opening, which names the role, nor an end without text. A token's text alone may be empty."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or not choice.get("finish_reason")
    text = delta.get("content") or delta.get("reasoning_content")
    return bool(text) or not (choice.get("finish_reason") or "role" in delta)
