"""A model in a Hugging Face folder: config.json, tokenizer files and one or more safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
)
from services.gpu_engine.models.family import TensorSpec
from services.gpu_engine.models.hugging_face_config import model_config, read_json
from services.gpu_engine.models.safetensors_file import SafetensorsEntry, SafetensorsFile
from services.gpu_engine.models.tensors import StoredTensor, TensorType
from services.gpu_engine.models.tokenizer import TokenizerFiles, unencodable_bytes

DTYPES = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16}
DERIVED_TENSOR = ".rotary_emb.inv_freq"  # stored by old exporters; follows from the config
INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint(Checkpoint):
    """Reads a Hugging Face folder."""

    def __init__(self, path: Path) -> None:
        config = model_config(path)
        super().__init__(path, config, _tokenizer(path))
        self._files: dict[str, SafetensorsFile] = {}
        for file in _files(path):
            for name in file.tensors:
                if name in self._files:
                    raise CorruptCheckpointError(f"{path}: tensor {name} is in two files")
                self._files[name] = file
        self.check_tensors()

    def stored_name(self, spec: TensorSpec) -> str:
        return spec.hugging_face

    def stored_names(self) -> set[str]:
        names = {name for name in self._files if not name.endswith(DERIVED_TENSOR)}
        # Some exporters write the tied head a second time; the config says which of the two counts.
        return names - {"lm_head.weight"} if self.config.tied_embeddings else names

    def tensor(self, spec: TensorSpec) -> StoredTensor:
        file = self._files.get(spec.hugging_face)
        if file is None:
            raise CorruptCheckpointError(f"{self.path}: tensor {spec.hugging_face} is missing")
        entry = file.tensors[spec.hugging_face]
        self.require_shape(spec, entry.shape, spec.stored_shape)
        kind = DTYPES.get(entry.dtype)
        if kind is None:
            raise UnsupportedCheckpointError(
                f"{file.path}: tensor {spec.hugging_face} has dtype {entry.dtype}, supported are {', '.join(DTYPES)}"
            )
        rows = _rows(file, entry, kind, spec.hugging_face)
        if spec.stored_rows:
            rows = rows[spec.first_row : spec.first_row + spec.shape[0]]
        return StoredTensor(spec.shape, kind, rows)


def _rows(file: SafetensorsFile, entry: SafetensorsEntry, kind: TensorType, name: str) -> Any:
    rows = int(np.prod(entry.shape[:-1], dtype=object))
    row_bytes = kind.row_bytes(entry.shape[-1])
    data = file.bytes_of(entry)
    if data.size != rows * row_bytes:
        raise CorruptCheckpointError(
            f"{file.path}: tensor {name} has {data.size} bytes, {kind.name} {entry.shape} needs {rows * row_bytes}"
        )
    return data.reshape(rows, row_bytes)


def _files(path: Path) -> list[SafetensorsFile]:
    index = path / INDEX
    if not index.exists():
        names = ["model.safetensors"]
    else:
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{index}: no weight_map of tensor name to file name") from error
    files = []
    for name in names:
        if Path(name).name != name or not (path / name).is_file():
            raise CorruptCheckpointError(f"{path}: weight file {name} is missing")
        files.append(SafetensorsFile(path / name))
    return files


def _tokenizer(path: Path) -> TokenizerFiles:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointNotFoundError(f"{path}: tokenizer.json is missing")
    content = file.read_bytes()
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    template_file = path / "chat_template.jinja"
    template = template_file.read_text() if template_file.exists() else _default_template(settings)
    return TokenizerFiles(
        json=content,
        chat_template=template,
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=_token_text(settings.get("eos_token")),
        unencodable_bytes=unencodable_bytes(content),
    )


def _default_template(settings: dict[str, Any]) -> str:
    """The chat template; of several named ones, that called default."""
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        return next((str(t["template"]) for t in template if t.get("name") == "default"), "")
    return str(template)


def _token_text(token: Any) -> str:
    """Special tokens are written as text, or as an object with their text and flags."""
    return str(token["content"]) if isinstance(token, dict) else str(token or "")
