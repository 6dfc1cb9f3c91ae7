"""What each key has used of its limits, in one small file that all workers of an instance map."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.dpu_gateway.access.keys import MAX_KEYS, Key
from services.dpu_gateway.errors import Overload, OverloadedError

WORKERS = 256
BURST_SECONDS = 10.0  # a key that was idle may send as much at once as its rate gives in this time
ROW = np.dtype(
    [
        ("owner", "V16"),  # the digest's beginning; zero for nobody
        ("allowance", "<f8"),  # requests that may come at once, as of `stamp`
        ("stamp", "<f8"),  # CLOCK_MONOTONIC, the same for all processes
        ("open", "<u2", WORKERS),  # requests under way, each worker its own
    ]
)
NOBODY = bytes(16)


def limits_path(directory: Path, instance: str) -> Path:
    """Where an instance's workers keep it."""
    return directory / f"limits-{instance}"


class Limits:
    """Workers share a port, so a client's connections spread over them: only a common account can hold a limit.

    Each worker writes its own count of open requests and, under a lock of a few microseconds, the rate's allowance.
    What a killed worker had open is forgotten when its successor starts.
    """

    def __init__(
        self, path: Path, worker: int, retry_after: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker = worker
        self._retry_after = retry_after
        self._clock = clock
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, ROW.itemsize * MAX_KEYS)  # zeros are an empty account
        self._rows: npt.NDArray[np.void] = np.frombuffer(mmap.mmap(self._fd, ROW.itemsize * MAX_KEYS), ROW)
        self._rows["open"][:, worker] = 0
        self._places: dict[bytes, int] = {}

    @contextmanager
    def admitted(self, key: Key) -> Iterator[None]:
        """One request of ``key``'s. Raises OverloadedError that says when to come again."""
        if key.requests_per_minute is None and key.concurrent_requests is None:
            yield
            return
        place = self._enter(key)
        try:
            yield
        finally:
            self._rows["open"][place, self._worker] -= 1

    def _enter(self, key: Key) -> int:
        with self._locked():
            place = self._place(key)
            row = self._rows[place]
            if key.concurrent_requests is not None:
                running = int(row["open"].sum())
                if running >= key.concurrent_requests:
                    raise OverloadedError(
                        Overload.CONCURRENCY_LIMIT,
                        f"{running} requests of {key.name} are under way, at most {key.concurrent_requests}",
                        self._retry_after,
                    )
            if key.requests_per_minute is not None:
                self._take(row, key, key.requests_per_minute / 60)
            row["open"][self._worker] += 1
        return place

    def _take(self, row: np.void, key: Key, per_second: float) -> None:
        now = self._clock()
        most = max(1.0, per_second * BURST_SECONDS)
        allowance = min(most, float(row["allowance"]) + (now - float(row["stamp"])) * per_second)
        if allowance < 1:
            raise OverloadedError(
                Overload.RATE_LIMIT,
                f"{key.name} may send {key.requests_per_minute:g} requests a minute",
                (1 - allowance) / per_second,
            )
        row["allowance"], row["stamp"] = allowance - 1, now

    def _place(self, key: Key) -> int:
        """The key's row, a new one with a full allowance when it has none; under the lock."""
        owner = key.digest[:16]
        place = self._places.get(owner)
        if place is not None and self._rows["owner"][place].tobytes() == owner:
            return place
        owners = self._rows["owner"].tobytes()
        starts = range(0, len(owners), 16)
        place = next((start // 16 for start in starts if owners[start : start + 16] == owner), None)
        if place is None:
            place = self._vacant(owners)
            self._rows[place] = (owner, np.inf, 0.0, 0)
        self._places[owner] = place
        return place

    def _vacant(self, owners: bytes) -> int:
        """A row of nobody's, else the one that was idle longest: that of a key that is gone."""
        for place in range(MAX_KEYS):
            if owners[16 * place : 16 * place + 16] == NOBODY:
                return place
        idle = self._rows["open"].sum(axis=1) == 0
        return int(np.where(idle, self._rows["stamp"], np.inf).argmin())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """The mapping goes with the last view of it."""
        self._rows["open"][:, self._worker] = 0
        os.close(self._fd)
