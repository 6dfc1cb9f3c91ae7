"""An OpenAI server with known delays, which notes when it did what by the clock that its clients use."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Served:
    """One request."""

    body: dict[str, Any]
    received: float
    sent: list[float] = field(default_factory=list)  # before each token


@dataclass
class StandInServer:
    """Answers each request with ``max_tokens`` tokens; ``wait_for`` holds all answers until so many have come."""

    first: float = 0.0  # seconds to the first token
    gap: float = 0.0  # from token to token
    wait_for: int = 0
    cut_after: int | None = None  # tokens, then the connection breaks
    refuse: int = 0  # an HTTP status for all
    url: str = ""
    served: list[Served] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        served = Served(await request.json(), time.monotonic())
        self.served.append(served)
        if self.refuse:
            return web.json_response({"error": {"message": "no"}}, status=self.refuse)
        while len(self.served) < self.wait_for:  # noqa: ASYNC110 - no event tells of the next
            await asyncio.sleep(0.005)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        chat = request.path.endswith("chat/completions")
        if chat:
            await self._event(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(self.first)
        count = served.body["max_tokens"]
        for index in range(count):
            if index == self.cut_after:
                assert request.transport is not None
                request.transport.close()
                return response
            if index:
                await asyncio.sleep(self.gap)
            served.sent.append(time.monotonic())
            choice = {"delta": {"content": " a"}} if chat else {"text": " a", "finish_reason": None}
            await self._event(response, {"choices": [choice]})
        end = {"delta": {}, "finish_reason": "length"} if chat else {"text": "", "finish_reason": "length"}
        await self._event(response, {"choices": [end]})
        await self._event(response, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def _event(response: web.StreamResponse, values: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(values).encode() + b"\n\n")

    @staticmethod
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stand-in"}]})

    @contextmanager
    def running(self) -> Iterator[StandInServer]:
        """In a thread with an event loop of its own."""
        loop = asyncio.new_event_loop()
        app = web.Application()
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(app)

        async def start() -> None:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        asyncio.run_coroutine_threadsafe(start(), loop).result()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
