"""``python -m services.bootstrap.probe [SECONDS]``: is this machine's engine alive? For a container's probe.

Bootstrap is asked, as it reaches the ring wherever that lies. Alive is: it answers, the ring's state is READY or
DRAINING, the heartbeat moves, and requests have not been without a step for SECONDS (120). A step may well take longer
than a probe, so bootstrap counts these from one probe to the next. Exits with 0, or with one line that says what is
wrong.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

from services.common.errors import BlinkError
from services.common.runtime import DEFAULT_INSTANCE, status_path

# By name, and nothing of services.ring, which imports numpy: this runs again and again on a host that has other work.
ALIVE = {"READY", "DRAINING"}
WATCH_SECONDS = 10.0  # the cpu engine's heart beats once a layer
STALL_SECONDS = 120.0
LOOK_SECONDS = 0.1
ANSWER_SECONDS = 4.0


def require_alive(
    instance: str, watch: float = WATCH_SECONDS, patience: float = ANSWER_SECONDS, stall: float = STALL_SECONDS
) -> None:
    """Look until a heartbeat is seen, for ``watch`` seconds at most. Raises BlinkError.

    ``patience``: seconds for one answer; ``stall``: seconds that requests may be without a step.
    """
    first = ask(instance, patience)
    end = time.monotonic() + watch
    while True:
        now = ask(instance, patience)
        if now["state"] not in ALIVE:
            raise BlinkError(f"the engine's state is {now['state']}")
        if now["stalled"] >= stall:
            raise BlinkError(f"the engine is not alive: its requests make no steps for {now['stalled']:.0f} s")
        if now["heartbeat"] != first["heartbeat"]:
            return
        if time.monotonic() >= end:
            raise BlinkError(f"the engine is not alive: its heartbeat stands still for {watch:g} s")
        time.sleep(LOOK_SECONDS)


def ask(instance: str, patience: float = ANSWER_SECONDS) -> dict[str, Any]:
    """A Pulse (status.py) from the instance's bootstrap. Raises BlinkError."""
    path = status_path(instance)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(patience)
        try:
            connection.connect(str(path))
            with connection.makefile("rb") as answer:
                found: dict[str, Any] = json.loads(answer.readline())
        except TimeoutError:
            raise BlinkError(f"bootstrap does not answer at {path} within {patience:g} s") from None
        except OSError as error:
            raise BlinkError(f"bootstrap is not reached at {path}: {error.strerror}; is the engine running?") from error
        except ValueError as error:
            raise BlinkError(f"bootstrap's answer at {path} makes no sense: {error}") from error
    if "error" in found:
        raise BlinkError(f"bootstrap can't read the ring: {found['error']}")
    return found


def main() -> None:
    """The probe."""
    try:
        stall = float(sys.argv[1]) if len(sys.argv) > 1 else STALL_SECONDS
        require_alive(os.environ.get("BLINK_BOOTSTRAP_INSTANCE", DEFAULT_INSTANCE), stall=stall)
    except BlinkError as error:
        sys.exit(f"blink: {error}")


if __name__ == "__main__":
    main()
