"""Open a checkpoint of whichever format a path holds."""

from __future__ import annotations

from pathlib import Path

from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.errors import CheckpointNotFoundError, naming
from services.gpu_engine.models.gguf_checkpoint import GgufCheckpoint
from services.gpu_engine.models.safetensors_checkpoint import SafetensorsCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, a folder that holds exactly one, or a Hugging Face safetensors folder.

    Reads headers and the tokenizer only (tens of milliseconds for a small model); weights stay on disk.

    Raises:
        CheckpointError: with what is wrong and what is supported.
    """
    with naming(path):
        return _open(path)


def _open(path: Path) -> Checkpoint:
    if path.is_file():
        return GgufCheckpoint(path)
    if (path / "config.json").is_file():
        return SafetensorsCheckpoint(path)
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) == 1:
        return GgufCheckpoint(files[0])
    if files:
        raise CheckpointNotFoundError(f"{path} holds {len(files)} GGUF files; name one of them")
    raise CheckpointNotFoundError(f"{path} is neither a GGUF file nor a folder with one or with a config.json")
