"""Where the processes of one Blink instance meet on this machine.

Several instances run side by side under different names; every path that they share with the world holds the name.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from services.common.errors import BlinkError

DEFAULT_INSTANCE = "default"
_INSTANCE_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


def _check_instance(name: str) -> str:
    if not _INSTANCE_PATTERN.fullmatch(name):
        raise PydanticCustomError("instance_name", "must be 1 to 32 of a-z, 0-9 and -, and not begin with -")
    return name


InstanceName = Annotated[str, AfterValidator(_check_instance)]


def runtime_directory() -> Path:
    """This user's private directory for sockets, made when it is missing.

    ``BLINK_RUNTIME_DIR``, else ``blink`` in the session's runtime directory, else ``/tmp/blink-<user id>``.

    Raises:
        BlinkError: it can't be made, or others could put sockets of their own into it.
    """
    if chosen := os.environ.get("BLINK_RUNTIME_DIR"):
        directory = Path(chosen)
    elif session := os.environ.get("XDG_RUNTIME_DIR"):
        directory = Path(session) / "blink"
    else:
        directory = Path(f"/tmp/blink-{os.getuid()}")  # noqa: S108 (its owner and mode are checked below)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise BlinkError(
            f"cannot make runtime directory {directory}: {error.strerror}; set BLINK_RUNTIME_DIR"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BlinkError(f"runtime directory {directory} is not this user's alone (mode 0700); set BLINK_RUNTIME_DIR")
    return directory


def bootstrap_address(instance: str) -> str:
    """The gRPC target at which an instance's bootstrap serves the handshake by default."""
    return f"unix:{runtime_directory() / f'bootstrap-{instance}.sock'}"


def status_path(instance: str) -> Path:
    """The unix socket at which an instance's bootstrap tells how its ring stands."""
    return runtime_directory() / f"status-{instance}.sock"


def ring_path(instance: str) -> Path:
    """The shared memory file of an instance's ring."""
    return Path(f"/dev/shm/blink-{instance}")  # noqa: S108 (POSIX shared memory; the file's mode is 0600)
