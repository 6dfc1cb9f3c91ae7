"""A gateway worker that notes when each request passes: ``python bench/marked_gateway.py MARKS [a worker's flags]``.

Run as a file, it takes ``services`` from its interpreter's own checkout, so that two of them can be compared. At its
end MARKS gets, by the prompt's key, when the request was there, when it lay in the ring, when its first token was found
in the log, when that was given to gRPC, and when gRPC had sent it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Awaitable
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


def prompt_key(ids: Any) -> str:
    """As in bench.paced_engine, which an interpreter of another checkout may not have."""
    return f"{zlib.crc32(np.asarray(ids, np.uint32).tobytes()):08x}"


class Marks:
    """Wraps what a request passes through."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, float]] = {}
        self._awaited: dict[int, dict[str, float]] = {}  # by position: its first token is to come

    def install(self) -> None:
        run, submit, feed = Generations.run, Session.submit, Stream.feed_tokens
        marks = self

        async def marked_run(generations: Any, message: Any, caller: Any, write: Any, *rest: Any) -> None:
            entered = time.monotonic()
            mark = marks.of[prompt_key(message.token_ids.ids)] = {"entered": entered}

            def marked_write(response: Any) -> Awaitable[object]:
                if "written" not in mark and response.HasField("chunk"):
                    return noted(response)
                found: Awaitable[object] = write(response)
                return found

            async def noted(response: Any) -> None:
                mark["writing"] = time.monotonic()
                await write(response)
                mark["written"] = time.monotonic()

            await run(generations, message, caller, marked_write, *rest)

        def marked_submit(session: Any, claim: Any, request: Any, slot: int, prompt: list[int], *rest: Any) -> Stream:
            stream = submit(session, claim, request, slot, prompt, *rest)
            mark = marks._awaited[stream.position] = marks.of[prompt_key(prompt)]
            mark["in_ring"] = time.monotonic()
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


def serve(settings: GatewaySettings) -> int:
    marks = Marks()
    marks.install()
    try:
        return main(settings)
    finally:
        Path(sys.argv[1]).write_text(json.dumps(marks.of))


if __name__ == "__main__":
    run_process(GatewaySettings, serve, sys.argv[2:])
