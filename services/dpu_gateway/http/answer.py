"""One HTTP request's answer: all its choices run at once, streamed as they come or sent whole at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from blink.v1 import inference_pb2 as pb
from pydantic_core import to_json
from starlette.types import Send

from services.dpu_gateway.access.callers import Caller
from services.dpu_gateway.choices import run_together
from services.dpu_gateway.errors import GatewayError
from services.dpu_gateway.generation import Generations
from services.dpu_gateway.http.errors import from_gateway, rate_headers
from services.dpu_gateway.http.formats import REASONS, Format, Json, joined, usage
from services.dpu_gateway.http.schema import StreamOptions
from services.dpu_gateway.tracing import Trace

EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
JSON = b"application/json"
REQUEST_ID = b"x-request-id"


@dataclass(slots=True)
class Choice:
    """What is known of one of the answer's generations."""

    index: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt
    reason: str = ""
    length: int = 0  # characters of text in tokens with log-probabilities
    texts: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)


_Headers = list[tuple[bytes, bytes]]
_Write = Callable[[Choice, pb.GenerateResponse], Awaitable[None]]


class Answer:
    """``messages``: one generation for each choice. ``repeats``: how many choices in a row share one prompt."""

    def __init__(
        self,
        generations: Generations,
        messages: Sequence[pb.GenerateRequest],
        format_: Format,
        *,
        caller: Caller,
        trace: Trace,
        request_id: str,
        model: str,
        repeats: int,
    ) -> None:
        self._generations = generations
        self._messages = messages
        self._caller = caller
        self._trace = trace
        self._format = format_
        self._id = request_id
        self._head: Json = {"id": request_id, "object": "", "created": int(time.time()), "model": model}
        self._repeats = repeats
        self._choices = [Choice(index) for index in range(len(messages))]

    async def send_whole(self, send: Send) -> None:
        """Raises GatewayError while nothing is sent."""
        await self._run(self._collect)
        with_logprobs = self._messages[0].HasField("logprobs")
        choices = [
            self._format.choice(
                choice.index,
                "".join(choice.texts),
                joined(self._format, choice.logprobs) if with_logprobs else None,
                choice.reason,
            )
            for choice in self._choices
        ]
        self._head["object"] = self._format.whole_object
        body = to_json({**self._head, "choices": choices, "usage": self._usage()})
        headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body)), *self._headers()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def stream(self, send: Send, options: StreamOptions) -> None:
        """Server-sent events, one for each part of a choice, then ``[DONE]``.

        Nothing is sent before every choice is in the engine's queue: until then GatewayError is raised, and after
        that a failure is the stream's last event.
        """
        self._head["object"] = self._format.chunk_object
        stream = _EventStream(send, self._headers, len(self._choices))
        rest: Json = {"usage": None} if options.include_usage else {}
        continuous = options.include_usage and options.continuous_usage_stats

        async def write(choice: Choice, event: pb.GenerateResponse) -> None:
            if event.HasField("accepted"):
                choice.prompt_tokens = event.accepted.prompt_tokens
                await stream.open()
                part = self._format.opening(choice.index)
            else:
                part = self._part(choice, event)
            if continuous:
                rest["usage"] = self._usage()
            if part is not None:
                await stream.write(to_json({**self._head, "choices": [part], **rest}))

        try:
            await self._run(write)
            if options.include_usage:
                await stream.write(to_json({**self._head, "choices": [], "usage": self._usage()}))
            await stream.end(b"data: [DONE]\n\n")
        except GatewayError as error:
            if not stream.is_open:
                raise
            await stream.end(b"data: " + to_json(from_gateway(error).body()) + b"\n\n")

    async def _run(self, write: _Write) -> None:
        """Run all choices; the first failure ends the others. Raises GatewayError."""
        await run_together(
            [self._one(choice, message, write) for choice, message in zip(self._choices, self._messages, strict=True)]
        )

    async def _one(self, choice: Choice, message: pb.GenerateRequest, write: _Write) -> None:
        await self._generations.run(message, self._caller, lambda event: write(choice, event), self._trace)

    async def _collect(self, choice: Choice, event: pb.GenerateResponse) -> None:
        if event.HasField("accepted"):
            choice.prompt_tokens = event.accepted.prompt_tokens
        elif event.HasField("chunk"):
            choice.texts.append(event.chunk.text)
            if event.chunk.logprobs:
                choice.logprobs.append(self._logprobs(choice, event.chunk))
        else:
            choice.texts.append(event.finished.text)
            self._finish(choice, event.finished)

    def _part(self, choice: Choice, event: pb.GenerateResponse) -> Json:
        if event.HasField("chunk"):
            choice.completion_tokens += len(event.chunk.token_ids)
            choice.cached_tokens = event.chunk.cached_tokens
            logprobs = self._logprobs(choice, event.chunk) if event.chunk.logprobs else None
            return self._format.delta(choice.index, event.chunk.text, logprobs, None)
        self._finish(choice, event.finished)
        return self._format.delta(choice.index, event.finished.text, None, choice.reason)

    def _logprobs(self, choice: Choice, chunk: pb.TokenChunk) -> Json:
        tokens = list(zip(chunk.token_ids, chunk.logprobs, strict=True))
        logprobs = self._format.logprobs(tokens, choice.length)
        choice.length += sum(len(name) for name in logprobs.get("tokens", ()))
        return logprobs

    @staticmethod
    def _finish(choice: Choice, finished: pb.Finished) -> None:
        choice.completion_tokens = finished.usage.completion_tokens
        choice.cached_tokens = finished.usage.cached_tokens
        choice.reason = REASONS[finished.reason]

    def _headers(self) -> _Headers:
        """The request's id, and what is left of the caller's rates as the answer begins."""
        rates = ((name.encode(), value.encode()) for name, value in rate_headers(self._caller).items())
        return [(REQUEST_ID, self._id.encode()), *rates]

    def _usage(self) -> Json:
        choices = self._choices
        prompts = [choice.prompt_tokens for choice in choices[:: self._repeats]]
        cached = [choice.cached_tokens for choice in choices[:: self._repeats]]
        return usage(prompts, cached, [choice.completion_tokens for choice in choices])


class _EventStream:
    """Opens once every one of ``writers`` asked for it; until then they wait."""

    def __init__(self, send: Send, headers: Callable[[], _Headers], writers: int) -> None:
        self._send = send
        self._headers = headers
        self._missing = writers
        self._opened = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def open(self) -> None:
        self._missing -= 1
        if self._missing:
            await self._opened.wait()
            return
        headers = [*EVENT_STREAM, *self._headers()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._opened.set()

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    async def end(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data})
