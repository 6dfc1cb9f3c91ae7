"""Unix sockets of bootstrap's: where one may be bound."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from services.bootstrap.errors import BootstrapError

MAX_UNIX_PATH = 107  # sockaddr_un.sun_path less its final zero


def make_way(path: Path) -> None:
    """Remove the socket of a killed run; refuse one that is served, as servers would take it over in silence.

    Raises BootstrapError: the path is too long, in use, or of something else.
    """
    if len(os.fsencode(path)) > MAX_UNIX_PATH:
        raise BootstrapError(f"socket path {path} is too long, at most {MAX_UNIX_PATH} bytes: set BLINK_RUNTIME_DIR")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise BootstrapError(f"cannot listen on {path}: a file that is no socket lies there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise BootstrapError(f"cannot listen on {path}: {error.strerror}") from error
    raise BootstrapError(f"cannot listen on {path}: another bootstrap serves there; stop it or choose another instance")
