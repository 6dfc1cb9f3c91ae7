"""A gateway worker that notes when each request passes: ``python bench/marked_gateway.py MARKS [a worker's flags]``.

Run as a file, it takes ``services`` from its interpreter's own checkout, so that two of them can be compared. At its
end MARKS gets, by the prompt's key, when the request was there, when it lay in the ring, when its first token was found
in the log, and when that was given to gRPC.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Awaitable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as services.dpu_gateway.__main__ does it
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import numpy as np

from services.common.process import run_process
from services.dpu_gateway.generation import Generations
from services.dpu_gateway.session import Session
from services.dpu_gateway.settings import GatewaySettings
from services.dpu_gateway.streams import Stream
from services.dpu_gateway.worker import main

CURRENT: ContextVar[dict[str, Any]] = ContextVar("mark")


class Marks:
    """Wraps what a request passes through."""

    def __init__(self) -> None:
        self._all: list[tuple[Any, dict[str, Any]]] = []  # (message, its mark)
        self._awaited: dict[int, dict[str, Any]] = {}  # by position: its first token is to come

    def install(self) -> None:
        run, submit, feed = Generations.run, Session.submit, Stream.feed_tokens
        marks = self

        async def marked_run(generations: Any, message: Any, caller: Any, write: Any, *rest: Any) -> None:
            mark: dict[str, Any] = {"entered": time.monotonic()}
            CURRENT.set(mark)
            marks._all.append((message, mark))

            def marked_write(response: Any) -> Awaitable[object]:
                if "writing" not in mark and response.HasField("chunk"):
                    mark["writing"] = time.monotonic()
                found: Awaitable[object] = write(response)
                return found

            await run(generations, message, caller, marked_write, *rest)

        def marked_submit(session: Any, claim: Any, request: Any, slot: int, prompt: list[int], *rest: Any) -> Stream:
            stream = submit(session, claim, request, slot, prompt, *rest)
            mark = marks._awaited[stream.position] = CURRENT.get()
            mark["in_ring"], mark["ids"] = time.monotonic(), prompt
            return stream

        def marked_feed(stream: Stream, tokens: list[int]) -> None:
            feed(stream, tokens)
            mark = marks._awaited.pop(stream.position, None)
            if mark is not None:
                mark["seen"] = time.monotonic()

        for owner, name, marked in (
            (Generations, "run", marked_run),
            (Session, "submit", marked_submit),
            (Stream, "feed_tokens", marked_feed),
        ):
            setattr(owner, name, marked)

    def by_prompt(self) -> dict[str, dict[str, Any]]:
        """What was noted; keys are those of what the client sent, ``engine`` is what the engine knows it by."""
        found = {}
        for message, mark in self._all:
            mark["engine"] = key_of(np.asarray(mark.pop("ids"), np.uint32).tobytes())
            sent = message.text.encode() or np.asarray(message.token_ids.ids, np.uint32).tobytes()
            found[key_of(sent)] = mark
        return found


def key_of(prompt: bytes) -> str:
    """As in bench.paced_engine, which an interpreter of another checkout may not have."""
    return f"{zlib.crc32(prompt):08x}"


def serve(settings: GatewaySettings) -> int:
    marks = Marks()
    marks.install()
    try:
        return main(settings)
    finally:
        Path(sys.argv[1]).write_text(json.dumps(marks.by_prompt()))


if __name__ == "__main__":
    run_process(GatewaySettings, serve, sys.argv[2:])
