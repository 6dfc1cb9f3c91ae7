"""What can be wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.errors import BlinkError


class CheckpointError(BlinkError):
    """A checkpoint can't be served; the message names the file, what is wrong and what would be right."""


class CheckpointNotFoundError(CheckpointError):
    """The path holds no checkpoint."""


class CorruptCheckpointError(CheckpointError):
    """The files contradict their own format: wrong magic, truncated, a missing or misshapen tensor."""


class UnsupportedCheckpointError(CheckpointError):
    """The files are sound, but ask for something that Blink would have to approximate."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put ``path`` before the message of a CheckpointError that does not begin with it: a config knows no file."""
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith(str(path)):
            raise
        raise type(error)(f"{path}: {error}") from error
