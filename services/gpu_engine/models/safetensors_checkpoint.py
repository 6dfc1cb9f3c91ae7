"""A model in a Hugging Face folder: config.json, tokenizer files and one or more safetensors files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.dequantize import plain_values
from services.gpu_engine.models.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
)
from services.gpu_engine.models.family import TensorSpec
from services.gpu_engine.models.hugging_face_config import model_config, read_json
from services.gpu_engine.models.quantization_config import quantization_of
from services.gpu_engine.models.safetensors_file import SafetensorsEntry, SafetensorsFile
from services.gpu_engine.models.scale import Scale
from services.gpu_engine.models.tensors import StoredTensor, TensorType
from services.gpu_engine.models.tokenizer import TokenizerFiles, unencodable_bytes

DTYPES = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16, "F8_E4M3": TensorType.F8_E4M3}
ACTIVATION_SCALE = "input_scale"  # beside FP8 weights, for engines that multiply in FP8
KV_SCALES = ("k_scale", "v_scale")  # of an attention layer
DERIVED_TENSOR = ".rotary_emb.inv_freq"  # stored by old exporters; follows from the config
INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint(Checkpoint):
    """Reads a Hugging Face folder."""

    def __init__(self, path: Path) -> None:
        config = model_config(path)
        super().__init__(path, config, _tokenizer(path))
        self._quantization = quantization_of(read_json(path / "config.json"), path / "config.json")
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
        names = {name for name in self._files if not name.endswith(DERIVED_TENSOR)} - self._scale_names()
        # Some exporters write the tied head a second time; the config says which of the two counts.
        return names - {"lm_head.weight"} if self.config.tied_embeddings else names

    def tensor(self, spec: TensorSpec) -> StoredTensor:
        file = self._files.get(spec.hugging_face)
        if file is None:
            raise CorruptCheckpointError(f"{self.path}: tensor {spec.hugging_face} is missing")
        entry = file.tensors[spec.hugging_face]
        self.require_shape(spec, entry.shape, spec.stored_shape)
        kind = _type_of(file, spec.hugging_face)
        rows = _rows(file, entry, kind, spec.hugging_face)
        if spec.stored_rows:
            rows = rows[spec.first_row : spec.first_row + spec.shape[0]]
        return StoredTensor(spec.shape, kind, rows, self._scale(spec) if kind is TensorType.F8_E4M3 else None)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        found = []
        for suffix in KV_SCALES:
            name = f"model.layers.{layer}.self_attn.{suffix}"
            found.append(float(self._positive(name).reshape(-1)[0]) if name in self._files else 1.0)
        return found[0], found[1]

    def _scale(self, spec: TensorSpec) -> Scale:
        """The scale of an FP8 matrix.

        Raises:
            CorruptCheckpointError: it is missing, misshapen or no positive number, or the config speaks against it.
            UnsupportedCheckpointError: the config has no quantization, or this is no matrix.
        """
        name, quantization = spec.hugging_face, self._quantization
        module, _, parameter = name.rpartition(".")
        if quantization is None or parameter != "weight" or len(spec.shape) != 2:
            raise UnsupportedCheckpointError(
                f"{self.path}: tensor {name} has dtype F8_E4M3, which is supported in weight matrices of a config with"
                " quantization_config"
            )
        if quantization.ignores(module):
            raise CorruptCheckpointError(
                f"{self.path}: tensor {name} has dtype F8_E4M3, but quantization_config says that {module} is not"
                " quantized"
            )
        values = self._positive(f"{module}.{quantization.scale_suffix}")
        (rows, columns), shape = spec.stored_shape, values.shape
        if quantization.block:
            block_rows, block_columns = quantization.block
            needed = -(-rows // block_rows), -(-columns // block_columns)
            if shape == needed:
                return Scale(values, block_rows, block_columns, spec.first_row)
        else:
            needed = rows, 1
            if shape in ((), (1,), (1, 1)):
                return Scale(values.reshape(1, 1), rows, columns, spec.first_row)
            if shape in ((rows,), (rows, 1)):
                return Scale(values.reshape(rows, 1), 1, columns, spec.first_row)
        raise CorruptCheckpointError(
            f"{self.path}: tensor {module}.{quantization.scale_suffix} has shape {shape}, must be {needed}"
            + ("" if quantization.block else " or (1,)")
        )

    def _positive(self, name: str) -> NDArray[np.float32]:
        """A tensor of factors, in its shape."""
        file = self._files.get(name)
        if file is None:
            raise CorruptCheckpointError(f"{self.path}: tensor {name} is missing")
        entry, kind = file.tensors[name], _type_of(file, name)
        if kind is TensorType.F8_E4M3 or 0 in entry.shape:
            raise UnsupportedCheckpointError(
                f"{file.path}: tensor {name} has dtype {entry.dtype} and shape {entry.shape}, must be F32, F16 or BF16"
            )
        flat = replace(entry, shape=(int(np.prod(entry.shape, dtype=object)),))
        values = plain_values(_rows(file, flat, kind, name), kind).reshape(entry.shape)
        if not (np.isfinite(values) & (values > 0)).all():
            raise CorruptCheckpointError(f"{file.path}: tensor {name} has a scale that is not a positive number")
        return values

    def _scale_names(self) -> set[str]:
        """Tensors that belong to FP8 weights, or to a KV cache in FP8."""
        if self._quantization is None:
            return set()
        names = {f"model.layers.{n}.self_attn.{suffix}" for n in range(self.config.layers) for suffix in KV_SCALES}
        for name, file in self._files.items():
            module, _, parameter = name.rpartition(".")
            if parameter == "weight" and file.tensors[name].dtype == "F8_E4M3":
                names |= {f"{module}.{self._quantization.scale_suffix}", f"{module}.{ACTIVATION_SCALE}"}
        return names


def _type_of(file: SafetensorsFile, name: str) -> TensorType:
    dtype = file.tensors[name].dtype
    if dtype not in DTYPES:
        raise UnsupportedCheckpointError(
            f"{file.path}: tensor {name} has dtype {dtype}, supported are {', '.join(DTYPES)}"
        )
    return DTYPES[dtype]


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
