"""How the engine's ring stands, for whoever asks on this machine: one in a GPU's memory is reached by its owner alone.

A connection to a unix socket gets one line of JSON and ends: ``{"state", "heartbeat", "stalled"}`` out of the ring's
header, or ``{"error"}``. It is served from the handshake's event loop, which sleeps until somebody asks.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from services.bootstrap.errors import BootstrapError
from services.bootstrap.sockets import make_way
from services.common.errors import BlinkError
from services.ring.header import RingStatus
from services.ring.schema import EngineState

STATES = {0: "LOADING", **{state.value: state.name for state in EngineState}}


class Pulse(TypedDict):
    """What tells a living engine from one that stands still."""

    state: str  # EngineState's name; LOADING before there is an engine
    heartbeat: int
    stalled: float  # seconds for which requests have been seen without a step


class Progress:
    """How long requests have been in the engine without a step, from one look to the next.

    One step may take longer than whoever asks can wait, so it is remembered here. A stall is counted from the first
    look that saw requests and so many steps, so it is never taken for longer than it is.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps = -1
        self._since: float | None = None

    def look(self, status: RingStatus) -> Pulse:
        """Of one read of the ring's header."""
        now, steps = self._clock(), int(status.engine["steps"])
        if not (status.counters["running"] or status.counters["waiting"]):
            self._since = None
        elif self._since is None or steps != self._steps:
            self._since = now
        self._steps = steps
        return {
            "state": STATES.get(int(status.engine["state"]), f"unknown ({int(status.engine['state'])})"),
            "heartbeat": int(status.engine["heartbeat"]),
            "stalled": 0.0 if self._since is None else now - self._since,
        }


class StatusSocket:
    """Answers with what ``look`` returns, which is called for each question and may raise BlinkError."""

    def __init__(self, path: Path, look: Callable[[], Pulse]) -> None:
        self._path = path
        self._look = look

    async def start(self) -> None:
        """Serve on the running event loop, to this user alone. Raises BootstrapError."""
        make_way(self._path)
        mask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._answer, self._path)
        except OSError as error:
            raise BootstrapError(f"cannot listen on {self._path}: {error.strerror}") from error
        finally:
            os.umask(mask)

    def stop(self) -> None:
        """Take no more questions, and remove the socket."""
        self._server.close()
        self._path.unlink(missing_ok=True)

    async def _answer(self, _: asyncio.StreamReader, asker: asyncio.StreamWriter) -> None:
        try:
            answer: object = self._look()
        except BlinkError as error:
            answer = {"error": str(error)}
        asker.write(json.dumps(answer).encode() + b"\n")
        asker.close()
