"""The file of API keys: hashes, names and limits."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from services.common.errors import BlinkError
from services.common.logging import get_logger

PREFIX = "bk-"
KEY_BYTES = 32
MAX_KEYS = 1024
RELOAD_SECONDS = 1.0  # between two looks at the file
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class KeyFileError(BlinkError):
    """The file cannot be used; the message names it and what is wrong, never a key."""


class KeyEntry(BaseModel):
    """One key's table in the file, under the name of whoever holds it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    requests_per_minute: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    tokens_per_minute: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | None = None
    concurrent_requests: Annotated[int, Field(ge=1, le=65_535)] | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """A key that was recognized: its digest stands for it everywhere else."""

    name: str
    digest: bytes  # SHA-256
    requests_per_minute: float | None = None
    concurrent_requests: int | None = None
    tokens_per_minute: float | None = None  # of prompts and outputs together

    @property
    def rates(self) -> dict[str, float]:
        """Those that it has, a minute, of ``requests`` and ``tokens``."""
        rates = {"requests": self.requests_per_minute, "tokens": self.tokens_per_minute}
        return {what: rate for what, rate in rates.items() if rate is not None}

    @property
    def limited(self) -> bool:
        return bool(self.rates) or self.concurrent_requests is not None


def new_key() -> tuple[str, str]:
    """A key of 256 random bits, and its SHA-256 in hexadecimal: all that is ever stored."""
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return key, hashlib.sha256(key.encode()).hexdigest()


class KeyFile:
    """Recognizes keys, and follows the file when it changes. A file that became unusable leaves the last good one.

    Keys are random, so one round of SHA-256 keeps them: there is nothing to guess that a slow hash would protect.
    They are found under a MAC of their digest with a secret of this process, so the time of a look-up tells nothing
    about the keys that there are; the digest itself is compared in constant time.

    Raises KeyFileError when it is unusable at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._secret = secrets.token_bytes(32)
        self._stamp = self._look()
        self._looked_at = time.monotonic()
        self._keys = self._load()

    def find(self, key: str) -> Key | None:
        """Whose key it is; None for nobody's."""
        self._refresh()
        digest = hashlib.sha256(key.encode(errors="replace")).digest()
        found = self._keys.get(self._mac(digest))
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < RELOAD_SECONDS:
            return
        self._looked_at = now
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        log = get_logger(path=str(self._path))
        try:
            self._keys = self._load()
        except KeyFileError as error:
            log.warning("key_file_refused", reason=str(error))
        else:
            log.info("key_file_taken", keys=len(self._keys))

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _load(self) -> Mapping[bytes, Key]:
        try:
            tables = tomllib.loads(self._path.read_text(encoding="utf-8"))
        except OSError as error:
            raise KeyFileError(f"key file {self._path}: {error.strerror}") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise KeyFileError(f"key file {self._path}: {error}") from error
        if len(tables) > MAX_KEYS:
            raise KeyFileError(f"key file {self._path} has {len(tables)} keys, at most {MAX_KEYS}")
        try:
            entries = TypeAdapter(dict[str, KeyEntry]).validate_python(tables)
        except ValidationError as error:
            problem = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise KeyFileError(f"key file {self._path}: {where}: {problem['msg']}") from error
        keys: dict[bytes, Key] = {}
        for name, entry in entries.items():
            if not NAME.fullmatch(name):
                raise KeyFileError(f"key file {self._path}: name {name!r} must be 1 to 64 of A-Z, a-z, 0-9, _, . and -")
            digest = bytes.fromhex(entry.sha256)
            key = Key(name, digest, entry.requests_per_minute, entry.concurrent_requests, entry.tokens_per_minute)
            if keys.setdefault(self._mac(digest), key) is not key:
                raise KeyFileError(f"key file {self._path}: {name} has the same sha256 as another name")
        return keys

    def _mac(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")
