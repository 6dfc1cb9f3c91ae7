"""What a killed bootstrap leaves behind."""

from __future__ import annotations

import fcntl
from pathlib import Path

UNIX_PREFIX = "unix:"


def remove_leftovers(ring: Path, address: str) -> None:
    """Remove a ring that no living process owns, and with it the socket of the handshake."""
    try:
        with ring.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ring.unlink()
    except FileNotFoundError:
        pass
    except BlockingIOError:
        return  # another instance of the same name has started meanwhile
    if address.startswith(UNIX_PREFIX):
        Path(address.removeprefix(UNIX_PREFIX)).unlink(missing_ok=True)
