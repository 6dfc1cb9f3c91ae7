"""A ring in POSIX shared memory: made by bootstrap, mapped by the gateways of the same machine."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from pathlib import Path

import numpy as np

from services.ring.errors import RingError, RingInUseError, TransportLostError
from services.ring.header import RingInfo, format_ring
from services.ring.memory import MemoryTransport, Region

logger = logging.getLogger(__name__)


class ShmRing:
    """The owner's side: the file, its lock and its memory.

    The file is locked for as long as its owner lives, so the file of a killed run is recognised by its missing lock.
    Every start makes a new inode: a gateway that still maps the old one sees a heartbeat that has stopped, never the
    new engine's words.
    """

    def __init__(self, path: Path, fd: int, region: Region) -> None:
        self.path = path
        self.region = region  # uint8 [ring_bytes], shared and writable
        self._fd = fd

    @classmethod
    def create(cls, path: str | Path, info: RingInfo) -> ShmRing:
        """Make the ring's file, zeroed and formatted, readable by this user alone.

        Raises:
            RingInUseError: another live process owns ``path``.
            RingError: the file system refuses the file or lacks the room.
        """
        path = Path(path)
        try:
            fd = _claim(path)
        except OSError as error:
            raise RingError(f"can't create ring {path}: {error.strerror}") from error
        try:
            size = info.geometry.ring_bytes
            os.posix_fallocate(fd, 0, size)  # no room must fail here, not as SIGBUS on first touch
            region = np.frombuffer(mmap.mmap(fd, size), np.uint8)
            format_ring(region, info)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise RingError(
                f"can't allocate {info.geometry.ring_bytes} bytes for ring {path}: {error.strerror}"
            ) from error
        return cls(path, fd, region)

    def close(self) -> None:
        """Remove the file and release its lock. The memory stays valid for whoever still holds ``region``."""
        if self._fd < 0:
            return
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> ShmRing:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ShmTransport(MemoryTransport):
    """A gateway's side: maps the ring's file."""

    def __init__(self, path: str | Path) -> None:
        """Raises TransportLostError when there is no ring at ``path`` or it may not be opened."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransportLostError(f"can't open ring {path}: {error.strerror}; is the engine running?") from error
        try:
            size = os.fstat(fd).st_size
            if size == 0:
                raise TransportLostError(f"ring {path} is not formatted yet: the engine is starting")
            region = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        finally:
            os.close(fd)
        super().__init__(region)


def _claim(path: Path) -> int:
    """Return a descriptor of a new, empty, locked file at ``path``; a stale file there is removed first."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _lock_holder(os.fstat(fd))
            os.close(fd)
            raise RingInUseError(str(path), pid) from None
        stat = os.fstat(fd)
        if not _is_at(path, stat):  # lost a race against another start or a close: look again
            os.close(fd)
            continue
        if stat.st_size == 0:
            return fd
        logger.warning("removing stale ring %s: its owner was killed", path)
        path.unlink()
        os.close(fd)


def _is_at(path: Path, stat: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), stat)
    except FileNotFoundError:
        return False


def _lock_holder(stat: os.stat_result) -> int | None:
    """The process that holds a flock on a file, from /proc/locks."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    identity = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    for line in lines:
        parts = line.split()  # 1: FLOCK ADVISORY WRITE 1234 00:1b:5678 0 EOF
        if len(parts) > 5 and parts[1] == "FLOCK" and parts[5] == identity:
            return int(parts[4]) if int(parts[4]) > 0 else None
    return None
