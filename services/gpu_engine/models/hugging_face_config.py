"""config.json and generation_config.json of a Hugging Face folder as a ModelConfig.

Whatever changes the arithmetic is either read or refused by name; nothing is approximated in silence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.gpu_engine.models.config import MixtureConfig, ModelConfig
from services.gpu_engine.models.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
)
from services.gpu_engine.models.hugging_face_rope import RopeSettings

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Phi3ForCausalLM": "phi3",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
PARTLY_ROTATED = ("phi3",)  # architectures that know partial_rotary_factor
# Settings that change the arithmetic, with the one value that is supported.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


def model_config(folder: Path) -> ModelConfig:
    """Read the model's numbers.

    Raises:
        CheckpointNotFoundError: there is no config.json.
        CorruptCheckpointError: a value is missing, of the wrong type or out of range.
        UnsupportedCheckpointError: the model asks for what Blink does not compute.
    """
    return _Config(folder).model()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
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
    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        self.values = read_json(self.path)
        generation = folder / "generation_config.json"
        self.generation = read_json(generation) if generation.exists() else {}

    def model(self) -> ModelConfig:
        names = self.values.get("architectures") or ["none"]
        if names[0] not in ARCHITECTURES:
            raise UnsupportedCheckpointError(
                f"{self.path}: architecture {names[0]!r} is not supported, only {', '.join(ARCHITECTURES)}"
            )
        architecture = ARCHITECTURES[names[0]]
        for name, only in FIXED.items():
            if (value := self.values.get(name, only)) != only:
                raise UnsupportedCheckpointError(f"{self.path}: {name} is {value!r}, only {only!r} is supported")
        context = self._int("max_position_embeddings")
        self._refuse_windows(context)
        rope = RopeSettings(self.path, self.values)
        if architecture not in PARTLY_ROTATED and rope.partial != 1.0:
            raise UnsupportedCheckpointError(
                f"{self.path}: partial_rotary_factor is {rope.partial}, only 1.0 is supported in {names[0]}"
            )
        layers, hidden, heads = (
            self._int(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        return ModelConfig(
            architecture=architecture,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=self._int("num_key_value_heads", heads),
            head_dim=self._int("head_dim", hidden // max(heads, 1)),
            ffn=self._int("intermediate_size"),
            vocabulary=self._int("vocab_size"),
            context=context,
            norm_eps=self._float("rms_norm_eps", 1e-6),
            rope_base=rope.base,
            rope_scaling=rope.scaling(),
            tied_embeddings=bool(self.values.get("tie_word_embeddings", False)),
            eos_ids=self._eos_ids(),
            partial_rotary=rope.partial,
            mixture=self._mixture(layers) if architecture == "qwen3_moe" else None,
        )

    def _refuse_windows(self, context: int) -> None:
        """Refuse sliding windows that would hide a key within the context; wider ones hide nothing."""
        window = self.values.get("sliding_window")
        used = self.values.get("use_sliding_window", True)
        if used and window is not None and (type(window) is not int or window < context):
            raise UnsupportedCheckpointError(
                f"{self.path}: sliding_window is {window!r}, below the context of {context}: only full attention is"
                " supported"
            )
        kinds = set(self.values.get("layer_types") or ()) - {"full_attention"}
        if kinds and used:
            raise UnsupportedCheckpointError(
                f"{self.path}: layer_types has {min(kinds)!r}, only 'full_attention' is supported"
            )

    def _mixture(self, layers: int) -> MixtureConfig:
        """Layer i is a mixture if (i + 1) is a multiple of decoder_sparse_step and i is not in mlp_only_layers."""
        step = self._int("decoder_sparse_step", 1)
        if step < 1:
            raise CorruptCheckpointError(f"{self.path}: decoder_sparse_step is {step}, must be at least 1")
        dense = self.values.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(index) is int and 0 <= index < layers for index in dense):
            raise CorruptCheckpointError(
                f"{self.path}: mlp_only_layers is {dense!r}, must be a list of indices below {layers}"
            )
        if self.values.get("shared_expert_intermediate_size"):
            raise UnsupportedCheckpointError(
                f"{self.path}: shared_expert_intermediate_size is {self.values['shared_expert_intermediate_size']!r},"
                " shared experts are not supported"
            )
        normalized = self.values.get("norm_topk_prob", False)
        if type(normalized) is not bool:
            raise CorruptCheckpointError(f"{self.path}: norm_topk_prob is {normalized!r}, must be true or false")
        experts = "num_experts" if "num_experts" in self.values else "num_local_experts"
        return MixtureConfig(
            experts=self._int(experts),
            per_token=self._int("num_experts_per_tok"),
            ffn=self._int("moe_intermediate_size"),
            normalized=normalized,
            dense_layers=tuple(index for index in range(layers) if index in dense or (index + 1) % step),
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
        value = self.values.get(name, default)
        if type(value) not in (int, float):
            raise CorruptCheckpointError(f"{self.path}: {name} is {value!r}, must be a number")
        return float(value)
