"""A model in one GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.config import FrequencyFactors, LinearScaling, ModelConfig, RopeScaling, YarnScaling
from services.gpu_engine.models.errors import CorruptCheckpointError, UnsupportedCheckpointError
from services.gpu_engine.models.family import TensorSpec
from services.gpu_engine.models.gguf_file import GgufFile
from services.gpu_engine.models.gguf_tokenizer import tokenizer_from_gguf
from services.gpu_engine.models.rope import yarn_attention_factor
from services.gpu_engine.models.tensors import StoredTensor, TensorType

GGML_TYPES = {
    0: TensorType.F32,
    1: TensorType.F16,
    2: TensorType.Q4_0,
    3: TensorType.Q4_1,
    8: TensorType.Q8_0,
    30: TensorType.BF16,
}
ARCHITECTURES = ("llama",)  # other families are read from Hugging Face folders alone
ROPE_FACTORS = "rope_freqs.weight"
ONLY_SPLIT_FILES = "split.count"


class GgufCheckpoint(Checkpoint):
    """Reads GGUF. q and k rows are put back into Hugging Face's rotary order, which moves whole rows: exact."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        super().__init__(path, _Metadata(self._file).config(), tokenizer_from_gguf(path, self._file.metadata))
        vocabulary = len(self._file.metadata["tokenizer.ggml.tokens"])
        if vocabulary != self.config.vocabulary:
            raise CorruptCheckpointError(f"{path}: {vocabulary} tokens, but the model has {self.config.vocabulary}")
        self.check_tensors()

    def stored_name(self, spec: TensorSpec) -> str:
        return spec.gguf

    def stored_names(self) -> set[str]:
        return set(self._file.tensors) - {ROPE_FACTORS}

    def tensor(self, spec: TensorSpec) -> StoredTensor:
        tensor = _stored(self._file, spec.gguf)
        self.require_shape(spec, tensor.shape)
        if not spec.rotary_heads:
            return tensor
        rows, row_bytes = tensor.data.shape
        interleaved = tensor.data.reshape(spec.rotary_heads, rows // spec.rotary_heads // 2, 2, row_bytes)
        halves = np.ascontiguousarray(interleaved.swapaxes(1, 2)).reshape(rows, row_bytes)
        return StoredTensor(tensor.shape, tensor.type, halves)


def _stored(file: GgufFile, name: str) -> StoredTensor:
    entry = file.tensors.get(name)
    if entry is None:
        raise CorruptCheckpointError(f"{file.path}: tensor {name} is missing")
    kind = GGML_TYPES.get(entry.type)
    if kind is None:
        supported = ", ".join(t.name for t in GGML_TYPES.values())
        raise UnsupportedCheckpointError(
            f"{file.path}: tensor {name} has GGML type {_ggml_name(entry.type)}, supported are {supported}"
        )
    if not entry.shape or entry.shape[-1] % kind.block_elements:
        raise CorruptCheckpointError(f"{file.path}: tensor {name} of {kind.name} has shape {entry.shape}")
    rows = int(np.prod(entry.shape[:-1], dtype=object))
    row_bytes = kind.row_bytes(entry.shape[-1])
    return StoredTensor(entry.shape, kind, file.bytes_of(entry, rows * row_bytes).reshape(rows, row_bytes))


def _ggml_name(number: int) -> str:
    """GGML's name of a tensor type, for messages."""
    names = {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"}
    return f"{names[number]} ({number})" if number in names else str(number)


class _Metadata:
    """GGUF metadata as a ModelConfig. Every key of the architecture must be known: none is passed over in silence."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.path = file.path
        self.architecture = self._get("general.architecture", str)
        self.used: set[str] = set()
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedCheckpointError(
                f"{self.path}: architecture {self.architecture!r} is not supported, only {', '.join(ARCHITECTURES)}"
            )
        if (count := self._get(ONLY_SPLIT_FILES, int, 1)) > 1:
            raise UnsupportedCheckpointError(f"{self.path}: one of {count} split files; merge them with gguf-split")

    def config(self) -> ModelConfig:
        heads = self._own("attention.head_count", int)
        hidden = self._own("embedding_length", int)
        head_dim = self._own("attention.key_length", int, 0)
        if not head_dim:
            if not heads or hidden % heads:
                raise CorruptCheckpointError(
                    f"{self.path}: embedding_length {hidden} is no multiple of attention.head_count {heads}"
                )
            head_dim = hidden // heads
        for name in ("attention.value_length", "rope.dimension_count"):
            if (value := self._own(name, int, head_dim)) != head_dim:
                raise UnsupportedCheckpointError(
                    f"{self.path}: {name} is {value}, only head_dim {head_dim} is supported"
                )
        if experts := self._own("expert_count", int, 0):
            raise UnsupportedCheckpointError(f"{self.path}: expert_count is {experts}, mixtures are not supported")
        vocabulary = self.file.tensors.get("token_embd.weight")
        config = ModelConfig(
            architecture=self.architecture,
            layers=self._own("block_count", int),
            hidden=hidden,
            heads=heads,
            kv_heads=self._own("attention.head_count_kv", int, heads),
            head_dim=head_dim,
            ffn=self._own("feed_forward_length", int),
            vocabulary=self._own("vocab_size", int, vocabulary.shape[0] if vocabulary else 0),
            context=self._own("context_length", int),
            norm_eps=self._own("attention.layer_norm_rms_epsilon", float),
            rope_base=self._own("rope.freq_base", float, 10000.0),
            rope_scaling=self._rope_scaling(head_dim),
            tied_embeddings="output.weight" not in self.file.tensors,
            eos_ids=self._eos_ids(),
        )
        prefix = f"{self.architecture}."
        unknown = {key for key in self.file.metadata if key.startswith(prefix)} - self.used
        if unknown:
            raise UnsupportedCheckpointError(f"{self.path}: metadata {sorted(unknown)[0]} is not supported")
        return config

    def _rope_scaling(self, head_dim: int) -> RopeScaling | None:
        kind = self._own("rope.scaling.type", str, "none")
        factor = self._own("rope.scaling.factor", float, 1.0)
        original = self._own("rope.scaling.original_context_length", int, 0)
        attention = self._own("rope.scaling.attn_factor", float, 1.0)
        self._own("rope.scaling.finetuned", bool, False)
        if ROPE_FACTORS in self.file.tensors:
            stored = _stored(self.file, ROPE_FACTORS)
            if kind != "none" or stored.type is not TensorType.F32 or stored.shape != (head_dim // 2,):
                raise UnsupportedCheckpointError(
                    f"{self.path}: {ROPE_FACTORS} is {stored.type.name} {stored.shape} beside scaling {kind!r},"
                    f" must be F32 ({head_dim // 2},) alone"
                )
            return FrequencyFactors(tuple(stored.data.view(np.float32).reshape(-1).tolist()))
        if kind == "none":
            return None
        if factor <= 0:
            raise CorruptCheckpointError(f"{self.path}: rope.scaling.factor is {factor}, must be above 0")
        if kind == "linear":
            return LinearScaling(factor)
        if kind == "yarn":
            if original < 1:
                raise CorruptCheckpointError(f"{self.path}: yarn scaling lacks rope.scaling.original_context_length")
            return YarnScaling(factor, original, attention * yarn_attention_factor(factor))
        raise UnsupportedCheckpointError(f"{self.path}: RoPE scaling {kind!r} is not supported, only linear and yarn")

    def _eos_ids(self) -> tuple[int, ...]:
        names = ("eos_token_id", "eot_token_id", "eom_token_id")
        keys = (f"tokenizer.ggml.{name}" for name in names)
        return tuple(sorted({self._get(key, int) for key in keys if key in self.file.metadata}))

    def _own(self, name: str, kind: type[Any], default: Any = None) -> Any:
        key = f"{self.architecture}.{name}"
        self.used.add(key)
        return self._get(key, kind, default)

    def _get(self, key: str, kind: type[Any], default: Any = None) -> Any:
        value = self.file.metadata.get(key, default)
        if value is None:
            raise CorruptCheckpointError(f"{self.path}: metadata {key} is missing")
        if type(value) is not kind:
            raise UnsupportedCheckpointError(f"{self.path}: metadata {key} is {value!r}, must be {kind.__name__}")
        return value
