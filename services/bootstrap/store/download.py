"""Fetches one pinned file over HTTP: resumes what an earlier try left, checks it, and only then gives it its name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

import requests

from services.bootstrap.store.errors import ChecksumError, ModelStoreError
from services.bootstrap.store.index import TIMEOUT_SECONDS, public_part, reason
from services.bootstrap.store.known import PinnedFile

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all

CHUNK_BYTES = 1 << 16  # also the most that a broken connection loses
TRIES_WITHOUT_PROGRESS = 3


def partial_path(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def download(session: requests.Session, url: str, file: PinnedFile, target: Path, progress: Progress) -> None:
    """Fetch ``url`` to ``target``, which appears only when complete and correct.

    A broken connection is resumed at once; the partial file also survives a failed call and serves the next one.

    Raises:
        ModelStoreError: the server can't be reached or refuses.
        ChecksumError: what came is not the pinned file; nothing of it is kept.
        OSError: the file can't be written.
    """
    partial = partial_path(target)
    resumed = partial.exists()
    _fetch(session, url, file, partial, progress)
    if not _matches(partial, file):
        partial.unlink()
        if not resumed:
            raise ChecksumError(_mismatch(url, file))
        # The damage may be in the part that an earlier try left: once more, all of it.
        _fetch(session, url, file, partial, progress)
        if not _matches(partial, file):
            partial.unlink()
            raise ChecksumError(_mismatch(url, file))
    partial.replace(target)


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _matches(path: Path, file: PinnedFile) -> bool:
    return path.stat().st_size == file.bytes and sha256_of(path) == file.sha256


def _mismatch(url: str, file: PinnedFile) -> str:
    return f"{file.name} from {public_part(url)} does not have the expected SHA-256 {file.sha256}; nothing was kept"


def _fetch(session: requests.Session, url: str, file: PinnedFile, partial: Path, progress: Progress) -> None:
    """Bring the partial file to its full size, over as many connections as make progress."""
    idle_tries = 0
    with partial.open("ab") as stream:
        while stream.tell() < file.bytes:
            start = stream.tell()
            try:
                _fetch_rest(session, url, file, stream, progress)
                failure = "the connection ended early"
            except requests.RequestException as error:
                failure = reason(error)
                if error.response is not None and error.response.status_code < 500:
                    raise ModelStoreError(f"cannot fetch {file.name} from {public_part(url)}: {failure}") from error
            idle_tries = 0 if stream.tell() > start else idle_tries + 1
            if idle_tries == TRIES_WITHOUT_PROGRESS:
                raise ModelStoreError(
                    f"cannot fetch {file.name} from {public_part(url)}: {failure}; "
                    f"{stream.tell()} of {file.bytes} bytes are kept, run it again to resume"
                )
        stream.truncate(file.bytes)


def _fetch_rest(session: requests.Session, url: str, file: PinnedFile, stream: IO[bytes], progress: Progress) -> None:
    # identity: a range of a compressed encoding would not fit onto the plain bytes already here
    headers = {"Accept-Encoding": "identity"}
    if start := stream.tell():
        headers["Range"] = f"bytes={start}-"
    with session.get(url, headers=headers, stream=True, timeout=TIMEOUT_SECONDS) as response:
        if response.status_code == 416:  # the partial file is longer than the file
            stream.truncate(0)
            return
        response.raise_for_status()
        if start and not _continues_at(response, start):
            stream.truncate(0)
            stream.seek(0)
        done = stream.tell()
        for chunk in response.iter_content(CHUNK_BYTES):
            stream.write(chunk)
            done += len(chunk)
            progress("download", min(done, file.bytes), file.bytes)
            if done >= file.bytes:
                return


def _continues_at(response: requests.Response, start: int) -> bool:
    content_range: str = response.headers.get("Content-Range", "")
    return response.status_code == 206 and content_range.startswith(f"bytes {start}-")
