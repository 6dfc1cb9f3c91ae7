"""The ring's file tells whether an instance runs, and what a killed one left behind."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterable
from pathlib import Path

from services.cli.errors import CommandError

UNIX_PREFIX = "unix:"


def require_free(ring: Path, instance: str) -> None:
    """Raises CommandError when a living process owns the instance's ring."""
    try:
        with ring.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CommandError(
            f"instance {instance!r} runs already: stop it, or start another with --instance NAME --listen HOST:PORT "
            "--http HOST:PORT"
        ) from None
    except OSError:
        return  # there is none, or bootstrap will say what is wrong with it


def remove_leftovers(ring: Path, address: str, files: Iterable[Path], figures: Path) -> None:
    """Remove a ring that no living process owns, and with it the socket of the handshake, the ``files`` of gateway
    workers and the directory of their figures."""
    try:
        with ring.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ring.unlink()
    except FileNotFoundError:
        pass
    except BlockingIOError:
        return  # another instance of the same name has started meanwhile
    if address.startswith(UNIX_PREFIX):
        files = [*files, Path(address.removeprefix(UNIX_PREFIX))]
    for path in files:
        path.unlink(missing_ok=True)
    shutil.rmtree(figures, ignore_errors=True)
