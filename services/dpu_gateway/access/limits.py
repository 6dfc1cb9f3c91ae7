"""What each key has used of its limits, in one small file that all workers of an instance map."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.dpu_gateway.access.keys import MAX_KEYS, Key
from services.dpu_gateway.errors import Overload, OverloadedError

WORKERS = 256
BURST_SECONDS = 10.0  # a key that was idle may send as much at once as its rate gives in this time
SETTLED_TOKENS = 256  # a stream's tokens are taken from the account in portions of so many
ROW = np.dtype(
    [
        ("owner", "V16"),  # the digest's beginning; zero for nobody
        ("requests", "<f8"),  # that may come at once, as of `stamp`
        ("tokens", "<f8"),  # that may be used at once, as of `stamp`; below zero is debt
        ("stamp", "<f8"),  # CLOCK_MONOTONIC, the same for all processes
        ("open", "<u2", WORKERS),  # requests under way, each worker its own
    ]
)
NOBODY = bytes(16)


def limits_path(directory: Path, instance: str) -> Path:
    """Where an instance's workers keep it."""
    return directory / f"accounts-{instance}"


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of one rate."""

    per_minute: float
    remaining: int  # that may come at once
    full_after: float  # seconds until as much as ever may come at once


class Meter:
    """Counts one request's tokens and takes them from its key's account now and then."""

    def __init__(self, settle: Callable[[int], None] | None = None) -> None:
        self._settle = settle
        self._tokens = 0

    def use(self, tokens: int) -> None:
        """So many tokens were read or generated."""
        self._tokens += tokens
        if self._tokens >= SETTLED_TOKENS:
            self.settle()

    def settle(self) -> None:
        """Take what has gathered."""
        if self._settle is not None and self._tokens:
            self._settle(self._tokens)
        self._tokens = 0


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
    def admitted(self, key: Key) -> Iterator[Meter]:
        """One request of ``key``'s. Raises OverloadedError that says when to come again.

        Tokens are paid for afterwards, as nobody knows how many a request will take: a key in debt waits until its rate
        has paid it off.
        """
        if not key.limited:
            yield Meter()
            return
        place = self._enter(key)
        meter = Meter() if key.tokens_per_minute is None else Meter(lambda tokens: self._spend(key, tokens))
        try:
            yield meter
        finally:
            meter.settle()
            self._rows["open"][place, self._worker] -= 1

    def allowances(self, key: Key) -> dict[str, Allowance]:
        """What is left of each rate that the key has, under ``requests`` and ``tokens``."""
        if not key.rates:
            return {}
        found = {}
        with self._locked():
            row = self._rows[self._place(key)]
            self._refill(row, key)
            for what, rate in key.rates.items():
                left = float(row[what])
                found[what] = Allowance(rate, max(0, int(left)), (_most(rate) - left) * 60 / rate)
        return found

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
            self._refill(row, key)
            for what, cause in (("requests", Overload.RATE_LIMIT), ("tokens", Overload.TOKEN_RATE_LIMIT)):
                rate = key.rates.get(what)
                if rate is not None and row[what] < 1:
                    verb = "send" if what == "requests" else "use"
                    raise OverloadedError(
                        cause, f"{key.name} may {verb} {rate:g} {what} a minute", (1 - float(row[what])) * 60 / rate
                    )
            if "requests" in key.rates:
                row["requests"] -= 1
            row["open"][self._worker] += 1
        return place

    def _spend(self, key: Key, tokens: int) -> None:
        with self._locked():
            row = self._rows[self._place(key)]
            self._refill(row, key)
            row["tokens"] -= tokens

    def _refill(self, row: np.void, key: Key) -> None:
        """What each rate gave since the last time; under the lock."""
        now = self._clock()
        seconds, row["stamp"] = max(0.0, now - float(row["stamp"])), now  # a machine that restarts begins at zero again
        for what, rate in key.rates.items():
            row[what] = min(_most(rate), float(row[what]) + seconds * rate / 60)

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
            self._rows[place] = (owner, np.inf, np.inf, 0.0, 0)
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


def _most(rate: float) -> float:
    """What may come at once of a rate a minute."""
    return max(1.0, rate / 60 * BURST_SECONDS)
