"""What was chosen by measuring, kept on disk for the next start."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from services.common.logging import get_logger
from services.gpu_engine.cuda.compiler import write_whole

log = get_logger(component="cuda_engine")


class KeptChoices:
    """Choices by what they were made for.

    Args:
        folder: None keeps nothing.
        made_with: names the GPU and the library: what the choices depend on besides.
    """

    def __init__(self, folder: Path | None, made_with: str) -> None:
        name = hashlib.sha256(made_with.encode()).hexdigest()[:32]
        self._file = folder / f"{name}.json" if folder else None
        self._made_with = made_with
        self._choices: dict[str, str] = {}
        self._changed = False
        if self._file and self._file.is_file():
            self._choices = _read(self._file)

    def get(self, what: object) -> str | None:
        return self._choices.get(str(what))

    def add(self, what: object, choice: str) -> None:
        self._changed = self._changed or self._choices.get(str(what)) != choice
        self._choices[str(what)] = choice

    def write(self) -> None:
        if self._file and self._changed:
            write_whole(self._file, json.dumps({"made with": self._made_with, "choices": self._choices}).encode())
            self._changed = False


def _read(file: Path) -> dict[str, str]:
    """Nothing, when the file is not what ``write`` writes: measuring anew costs seconds, and replaces it."""
    try:
        choices = json.loads(file.read_bytes())["choices"]
        return {str(what): str(choice) for what, choice in choices.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        log.warning("kept_choices_unreadable", file=str(file))
        return {}
