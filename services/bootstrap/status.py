"""How the engine's ring stands, for whoever asks on this machine: one in a GPU's memory is reached by its owner alone.

A connection to a unix socket gets one line of JSON and ends: ``{"state", "heartbeat", "steps", "running"}`` out of the
ring's header, or ``{"error"}``. It is served from the handshake's event loop, which sleeps until somebody asks.
"""

from __future__ import annotations

import asyncio
import json
import os
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
    steps: int
    running: int  # requests that hold KV pages


def pulse(status: RingStatus) -> Pulse:
    """Of one read of the ring's header."""
    engine = status.engine
    return {
        "state": STATES.get(int(engine["state"]), f"unknown ({int(engine['state'])})"),
        "heartbeat": int(engine["heartbeat"]),
        "steps": int(engine["steps"]),
        "running": int(status.counters["running"]),
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
