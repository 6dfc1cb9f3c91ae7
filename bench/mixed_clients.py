"""Requests by gRPC and HTTP mixed, some of them cancelled at random times; each answer is checked as it comes."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import httpx2
from blink.v1 import inference_pb2 as pb
from blink.v1 import inference_pb2_grpc

CHANNELS = 8
LIMIT = 120.0  # seconds that an answer may take
BACK_OFF = 0.05  # seconds after a refusal
MAX_TOKENS = 48
OK, CANCELLED, REFUSED, SHED = "ok", "cancelled", "refused", "shed"


class WrongAnswerError(Exception):
    """An answer that no request may get; the soak has found a fault."""


@dataclass(frozen=True)
class Ask:
    """One request: what the dice gave."""

    protocol: str  # grpc, completions or chat
    stream: bool
    prompt: str
    tokens: int
    choices: int
    priority: int
    cancel_after: float | None  # seconds

    @classmethod
    def roll(cls, dice: random.Random) -> Ask:
        protocol = dice.choice(("grpc", "grpc", "completions", "chat"))
        return cls(
            protocol=protocol,
            stream=dice.random() < 0.7,
            prompt="he" * dice.randint(1, 60),
            tokens=dice.randint(1, MAX_TOKENS),
            choices=1 if protocol == "grpc" or dice.random() < 0.8 else dice.randint(2, 4),
            priority=dice.choice((-1, 0, 0, 0, 1)),
            cancel_after=dice.expovariate(10) if dice.random() < 1 / 3 else None,
        )


class Clients:
    """``counts``: requests by protocol and how they ended, choices that ended with all their tokens, refusals."""

    def __init__(
        self, stubs: list[inference_pb2_grpc.InferenceAsyncStub], http: httpx2.AsyncClient, model: str
    ) -> None:
        self._stubs = stubs
        self._http = http
        self._model = model
        self._next = 0
        self.counts: Counter[str] = Counter()

    async def run(self, ask: Ask) -> None:
        """One request until it is answered or cancelled; refused ones come again. Raises WrongAnswerError."""
        while True:
            task = asyncio.ensure_future(self._by_grpc(ask) if ask.protocol == "grpc" else self._by_http(ask))
            handle = None
            if ask.cancel_after is not None:
                handle = asyncio.get_running_loop().call_later(ask.cancel_after, task.cancel)
            try:
                ending = await task
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is not None and current.cancelling():  # not the request alone: all of the load ends
                    task.cancel()
                    raise
                ending = CANCELLED
            finally:
                if handle is not None:
                    handle.cancel()
            self.counts[f"{ask.protocol} {ending}"] += 1
            if ending not in {REFUSED, SHED}:
                break
            await asyncio.sleep(BACK_OFF)
        if ending == OK:
            self.counts["whole choices"] += ask.choices

    async def _by_grpc(self, ask: Ask) -> str:
        self._next += 1
        message = pb.GenerateRequest(text=ask.prompt, priority=ask.priority)
        message.sampling.temperature = 0
        message.stop.max_tokens = ask.tokens
        message.stop.ignore_eos = True
        tokens, finished = 0, False
        call = self._stubs[self._next % len(self._stubs)].Generate(message, timeout=LIMIT)
        try:
            async for event in call:
                demand(not finished, "an event behind Finished", event)
                tokens += len(event.chunk.token_ids)
                finished = event.HasField("finished")
        except grpc.aio.AioRpcError as error:
            demand(error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "a status", error)
            return SHED if "gave way" in (error.details() or "") else REFUSED
        finally:
            call.cancel()
        demand(finished and tokens == ask.tokens, "a stream of another length", tokens, ask)
        return OK

    async def _by_http(self, ask: Ask) -> str:
        body: dict[str, object] = {
            **{"model": self._model, "max_tokens": ask.tokens, "n": ask.choices, "stream": ask.stream},
            **{"temperature": 0, "ignore_eos": True, "priority": ask.priority},
        }
        if ask.protocol == "chat":
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": ask.prompt}]
        else:
            path, body["prompt"] = "/v1/completions", ask.prompt
        if not ask.stream:
            response = await self._http.post(path, json=body)
            if response.status_code == 429:
                return _refusal(response.content)
            demand(response.status_code == 200, "a status", response.status_code, response.text)
            answer = response.json()
            demand(answer["usage"]["completion_tokens"] == ask.tokens * ask.choices, "a length", answer["usage"], ask)
            return OK
        body["stream_options"] = {"include_usage": True}
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code == 429:
                return _refusal(await response.aread())
            demand(response.status_code == 200, "a status", response.status_code)
            return await _read_events(response, ask)


async def _read_events(response: httpx2.Response, ask: Ask) -> str:
    last, used = "", 0
    async for line in response.aiter_lines():
        if not line:
            continue
        demand(last != "[DONE]", "an event behind [DONE]", line)
        last = line.removeprefix("data: ")
        if last == "[DONE]":
            continue
        event = json.loads(last)
        if "error" in event:  # it was queued, and gave way to one of higher priority
            demand(event["error"]["code"] == SHED, "an error in a stream", event)
            return SHED
        if event["usage"] is not None:
            used = event["usage"]["completion_tokens"]
    demand(last == "[DONE]", "a stream without its end", last)
    demand(used == ask.tokens * ask.choices, "a stream of another length", used, ask)
    return OK


def _refusal(body: bytes) -> str:
    return SHED if json.loads(body)["error"]["code"] == SHED else REFUSED


@asynccontextmanager
async def connected(address: str, url: str, trusted: bytes | None) -> AsyncIterator[Clients]:
    """Clients of a gateway's two addresses, over TLS where an authority (PEM) is given; their connections are theirs
    alone."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if trusted is None:
        channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CHANNELS)]
    else:
        credentials = grpc.ssl_channel_credentials(trusted)
        channels = [grpc.aio.secure_channel(address, credentials, options=options) for _ in range(CHANNELS)]
    verify = True if trusted is None else ssl.create_default_context(cadata=trusted.decode())
    limits = httpx2.Limits(max_connections=None)
    try:
        async with httpx2.AsyncClient(base_url=url, verify=verify, timeout=LIMIT, limits=limits) as http:
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            yield Clients([inference_pb2_grpc.InferenceStub(channel) for channel in channels], http, model)
    finally:
        for channel in channels:
            await channel.close()


def demand(condition: bool, what: str, *facts: object) -> None:
    """Raises WrongAnswerError with the facts."""
    if not condition:
        raise WrongAnswerError(f"{what}: {', '.join(map(str, facts))}")
