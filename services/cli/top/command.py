"""The command's loop."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import asdict

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from services.cli.errors import CommandError
from services.cli.program import AUTHORITY_VARIABLE
from services.cli.top.render import render
from services.cli.top.scrape import Scrape, read
from services.cli.top.snapshot import Snapshot

WINDOW_SECONDS = 60.0  # over which latencies are shown
ONCE_SECONDS = 0.5  # between the two readings that give rates


def top(http: str, interval: float, once: bool, as_json: bool) -> None:
    """Run the command. Raises CommandError when --once finds no gateway; Ctrl-C ends the live view as it should end."""
    url = _url(http)
    if once:
        _show(_once(url), as_json)
        return
    with suppress(KeyboardInterrupt):
        _watch(url, interval, as_json)


def _url(http: str) -> str:
    """Where to ask: with TLS when an authority is named, as the other commands do. Raises CommandError."""
    if http.startswith("unix:"):
        raise CommandError(f"--http {http}: only host:port and https://host:port can be read, not a unix socket")
    scheme = "https" if os.environ.get(AUTHORITY_VARIABLE) else "http"
    return (http if "://" in http else f"{scheme}://{http}").rstrip("/")


def _once(url: str) -> Snapshot:
    """Rates over a moment, latencies since the workers started."""
    first = read(url)
    time.sleep(ONCE_SECONDS)
    return Snapshot.of([first, read(url)], since_start=True)


def _watch(url: str, interval: float, as_json: bool) -> None:
    """Redraw until interrupted; a gateway that goes away is shown and waited for."""
    console = Console()
    readings: deque[Scrape] = deque()
    live = Live(console=console, auto_refresh=False, screen=True) if console.is_terminal and not as_json else None
    with live or nullcontext():
        while True:
            picture: RenderableType
            try:
                now = read(url)
                readings.append(now)
                while len(readings) > 2 and now.taken_at - readings[0].taken_at > WINDOW_SECONDS:
                    readings.popleft()
                snapshot = Snapshot.of(readings)
                picture = render(snapshot)
            except CommandError as error:
                readings.clear()
                picture = Text(str(error), "bold red")
            else:
                if as_json:
                    _show(snapshot, as_json)
            if live is not None:
                live.update(picture, refresh=True)
            elif not as_json:
                console.print(picture)
            sys.stdout.flush()
            time.sleep(interval)


def _show(snapshot: Snapshot, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(snapshot)))
    else:
        Console().print(render(snapshot))
