"""Child processes of ``blink up``: started, listened to, stopped, never left behind."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from services.common.process import PARENT_VARIABLE

FIRST_DELAY = 0.5  # seconds before the first restart; doubles with each failure
LONGEST_DELAY = 30.0
STABLE_SECONDS = 60.0  # a run this long makes the next failure the first again


@dataclass(frozen=True)
class Event:
    """Something a child said (a log event, or a line that is none), or that it has ended (``exit_code`` is set)."""

    child: Child
    name: str
    values: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None


class Child:
    """One process of the product, started again and again under the same name.

    It logs JSON on stderr; every line becomes an Event in ``events``, and so does its end. It runs in a process group
    of its own, so that Ctrl-C reaches ``blink up`` alone, and the kernel stops it when ``blink up`` ends.
    """

    def __init__(self, name: str, module: str, flags: list[str], events: queue.SimpleQueue[Event]) -> None:
        self.name = name
        self.ready = False  # kept by the owner, who knows which event means it
        self.was_ready = False
        self.last_error = ""
        self._command = [sys.executable, "-m", module, "--log-format=json", *flags]
        self._events = events
        self._process: subprocess.Popen[str] | None = None
        self._started_at = 0.0
        self._failures = 0

    def start(self) -> None:
        """Start the process. Call from the main thread: the child lives as long as the thread that made it."""
        self.ready = False
        self.last_error = ""
        self._started_at = time.monotonic()
        self._process = subprocess.Popen(  # noqa: S603 (our own modules)
            self._command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            process_group=0,
        )
        threading.Thread(target=self._listen, args=(self._process,), name=self.name, daemon=True).start()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    def restart_delay(self) -> float:
        """Seconds to wait before the next start; call once for each end."""
        if time.monotonic() - self._started_at >= STABLE_SECONDS:
            self._failures = 0
        delay = FIRST_DELAY * (1 << min(self._failures, 10))
        self._failures += 1
        return min(delay, LONGEST_DELAY)

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self._events.put(self._event(line.rstrip("\n")))
        self._events.put(Event(self, "exit", exit_code=process.wait()))

    def _event(self, line: str) -> Event:
        try:
            values = json.loads(line)
            return Event(self, str(values.pop("event")), values)
        except (ValueError, KeyError, AttributeError, TypeError):  # a library that writes to stderr by itself
            return Event(self, line, {"level": "warning"})


def describe_exit(code: int) -> str:
    """An exit code in words: ``killed by SIGKILL`` or ``exit code 1``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
