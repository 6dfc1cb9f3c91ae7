"""The two ends of one HTTP exchange: a request's body read within bounds, a client that goes away noticed at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive

from services.dpu_gateway.http.errors import HttpError


async def read_json_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """At most ``limit`` bytes; a longer body is refused before it is read where its length is told.

    Raises HttpError. ConnectionError when the client went away before it was complete.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"content-type is {kind!r}, must be application/json")
    told = headers.get("content-length", "")
    if told.isdigit() and int(told) > limit:
        raise HttpError(413, f"the body has {int(told)} bytes, at most {limit}", headers={"connection": "close"})
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client went away")
        body += message["body"]
        if len(body) > limit:
            raise HttpError(413, f"the body has more than {limit} bytes", headers={"connection": "close"})
        if not message.get("more_body", False):
            return bytes(body)


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Await ``work``; cancel it when the client goes away. The body must have been read."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait((task, watcher))
    if not task.cancelled():
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
