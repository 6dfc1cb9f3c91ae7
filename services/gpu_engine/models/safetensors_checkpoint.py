"""A model in a Hugging Face folder: config.json, tokenizer files and one or more safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.config import LinearScaling, Llama3Scaling, ModelConfig, RopeScaling, YarnScaling
from services.gpu_engine.models.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
)
from services.gpu_engine.models.family import TensorSpec
from services.gpu_engine.models.rope import yarn_attention_factor
from services.gpu_engine.models.safetensors_file import SafetensorsEntry, SafetensorsFile
from services.gpu_engine.models.tensors import StoredTensor, TensorType
from services.gpu_engine.models.tokenizer import TokenizerFiles, unencodable_bytes

DTYPES = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16}
ARCHITECTURES = {"LlamaForCausalLM": "llama"}
DERIVED_TENSOR = ".rotary_emb.inv_freq"  # stored by old exporters; follows from the config
INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint(Checkpoint):
    """Reads a Hugging Face folder."""

    def __init__(self, path: Path) -> None:
        config = _Config(path).model()
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
        self.require_shape(spec, entry.shape)
        kind = DTYPES.get(entry.dtype)
        if kind is None:
            raise UnsupportedCheckpointError(
                f"{file.path}: tensor {spec.hugging_face} has dtype {entry.dtype}, supported are {', '.join(DTYPES)}"
            )
        return StoredTensor(entry.shape, kind, _rows(file, entry, kind, spec.hugging_face))


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
            names = sorted(set(_read_json(index)["weight_map"].values()))
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
    settings = _read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
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


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointNotFoundError(f"{path} is missing")
    try:
        parsed = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptCheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CorruptCheckpointError(f"{path}: must hold a JSON object")
    return parsed


class _Config:
    """config.json as a ModelConfig."""

    # Settings that change the arithmetic, with the one value that means "as in Llama".
    FIXED = {  # noqa: RUF012
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "sliding_window": None,
        "quantization_config": None,
    }

    def __init__(self, path: Path) -> None:
        self.path = path / "config.json"
        self.values = _read_json(self.path)
        self.generation = (
            _read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
        )

    def model(self) -> ModelConfig:
        names = self.values.get("architectures") or ["none"]
        if names[0] not in ARCHITECTURES:
            raise UnsupportedCheckpointError(
                f"{self.path}: architecture {names[0]!r} is not supported, only {', '.join(ARCHITECTURES)}"
            )
        for name, only in self.FIXED.items():
            if (value := self.values.get(name, only)) != only:
                raise UnsupportedCheckpointError(f"{self.path}: {name} is {value!r}, only {only!r} is supported")
        hidden, heads = self._int("hidden_size"), self._int("num_attention_heads")
        return ModelConfig(
            architecture=ARCHITECTURES[names[0]],
            layers=self._int("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=self._int("num_key_value_heads", heads),
            head_dim=self._int("head_dim", hidden // max(heads, 1)),
            ffn=self._int("intermediate_size"),
            vocabulary=self._int("vocab_size"),
            context=self._int("max_position_embeddings"),
            norm_eps=self._float("rms_norm_eps", 1e-6),
            rope_base=self._rope_base(),
            rope_scaling=self._rope_scaling(),
            tied_embeddings=bool(self.values.get("tie_word_embeddings", False)),
            eos_ids=self._eos_ids(),
        )

    def _rope(self) -> dict[str, Any]:
        """Both spellings: rope_scaling beside rope_theta, or one rope_parameters object that holds both."""
        return self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}

    def _rope_base(self) -> float:
        base = self._rope().get("rope_theta", self.values.get("rope_theta", 10000.0))
        return self._number("rope_theta", base)

    def _rope_scaling(self) -> RopeScaling | None:
        rope = self._rope()
        kind = rope.get("rope_type", rope.get("type", "default"))

        def number(name: str, default: float | None = None) -> float:
            return self._number(f"rope scaling {name}", rope.get(name, default))

        def original_context() -> int:
            return int(number("original_max_position_embeddings", self.values.get("max_position_embeddings")))

        match kind:
            case "default":
                return None
            case "linear":
                return LinearScaling(number("factor"))
            case "llama3":
                return Llama3Scaling(
                    number("factor"), number("low_freq_factor"), number("high_freq_factor"), original_context()
                )
            case "yarn":
                for name in ("mscale", "mscale_all_dim"):
                    if rope.get(name):
                        raise UnsupportedCheckpointError(f"{self.path}: YaRN {name} is {rope[name]!r}, not supported")
                if rope.get("truncate", True) is not True:
                    raise UnsupportedCheckpointError(
                        f"{self.path}: YaRN truncate is {rope['truncate']!r}, must be true"
                    )
                factor = number("factor")
                attention = rope.get("attention_factor")
                return YarnScaling(
                    factor,
                    original_context(),
                    yarn_attention_factor(factor) if attention is None else number("attention_factor"),
                    float(rope.get("beta_fast") or 32.0),
                    float(rope.get("beta_slow") or 1.0),
                )
        raise UnsupportedCheckpointError(
            f"{self.path}: RoPE scaling {kind!r} is not supported, only default, linear, llama3 and yarn"
        )

    def _eos_ids(self) -> tuple[int, ...]:
        ids = self.generation.get("eos_token_id", self.values.get("eos_token_id"))
        ids = ids if isinstance(ids, list) else [ids]
        return tuple(sorted({int(token) for token in ids if token is not None}))

    def _int(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int:
            raise CorruptCheckpointError(f"{self.path}: {name} is {value!r}, must be an integer")
        return value

    def _float(self, name: str, default: float) -> float:
        return self._number(name, self.values.get(name, default))

    def _number(self, name: str, value: Any) -> float:
        if type(value) not in (int, float):
            raise CorruptCheckpointError(f"{self.path}: {name} is {value!r}, must be a number")
        return float(value)
