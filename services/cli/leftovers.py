"""What killed processes leave behind."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable
from pathlib import Path

UNIX_PREFIX = "unix:"


def remove_leftovers(ring: Path, address: str, sockets: Iterable[Path]) -> None:
    """Remove a ring that no living process owns, and with it the sockets of the handshake and of gateway workers."""
    try:
        with ring.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ring.unlink()
    except FileNotFoundError:
        pass
    except BlockingIOError:
        return  # another instance of the same name has started meanwhile
    if address.startswith(UNIX_PREFIX):
        sockets = [*sockets, Path(address.removeprefix(UNIX_PREFIX))]
    for path in sockets:
        path.unlink(missing_ok=True)
