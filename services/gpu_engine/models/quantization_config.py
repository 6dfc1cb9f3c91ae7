"""``quantization_config`` of a Hugging Face folder: which scales its FP8 weights have, by which names.

Three ways of writing it are read, all of them e4m3 weights whose value is what is stored times a scale:

- ``compressed-tensors`` (llm-compressor): ``X.weight_scale``, one for the tensor, for each row or for each block.
- ``fp8`` with ``weight_block_size`` (DeepSeek, Qwen3): ``X.weight_scale_inv`` for each block. In spite of the name it
  multiplies.
- ``fp8`` without (AutoFP8): ``X.weight_scale`` for the tensor.

What they say of activations is for engines that multiply in FP8: Blink multiplies activations as they are, so their
scales are read over. Scales of the KV cache hold for a cache in FP8. Everything else is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gpu_engine.models.errors import UnsupportedCheckpointError

BLOCK_COLUMNS = 128
METHODS = ("compressed-tensors", "fp8")
STRATEGIES = ("tensor", "channel", "block")
# Settings that are known, and what their values may be; None: any, they change nothing here.
FP8_SETTINGS: dict[str, tuple[Any, ...] | None] = {
    "quant_method": None,
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic", "static"),
    "weight_block_size": None,
    "modules_to_not_convert": None,
    "ignored_layers": None,
    "kv_cache_scheme": (None, "static"),
}
COMPRESSED_SETTINGS: dict[str, tuple[Any, ...] | None] = {
    "quant_method": None,
    "format": ("float-quantized", "naive-quantized"),
    "quantization_status": ("compressed", "frozen"),
    "config_groups": None,
    "ignore": None,
    "kv_cache_scheme": None,
    "sparsity_config": (None, {}, {"format": "dense"}),
    "transform_config": (None, {}),
    "global_compression_ratio": None,
    "version": None,
}
EIGHT_BITS = {"num_bits": (8,), "type": ("float",), "symmetric": (True,), "dynamic": (False,)}


@dataclass(frozen=True)
class Quantization:
    """How the FP8 weights of a checkpoint are stored.

    Attributes:
        scale_suffix: what follows a module's name in the name of its scale.
        block: (rows, columns) that share a scale; None where scales are one for each row, or one for the tensor.
        ignored: modules that are not quantized: names, or regular expressions after "re:".
    """

    scale_suffix: str
    block: tuple[int, int] | None
    ignored: tuple[str, ...]

    def ignores(self, module: str) -> bool:
        return any(
            re.match(entry[3:], module) if entry.startswith("re:") else entry == module for entry in self.ignored
        )


def quantization_of(values: Mapping[str, Any], path: Path) -> Quantization | None:
    """The quantization of a config.json, None where it has none.

    Args:
        values: of config.json.
        path: of it, for messages.

    Raises:
        UnsupportedCheckpointError: naming the setting.
    """
    config = values.get("quantization_config")
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config
    if method == "fp8":
        return _fp8(_Settings(path, "quantization_config", config, FP8_SETTINGS))
    if method == "compressed-tensors":
        return _compressed(_Settings(path, "quantization_config", config, COMPRESSED_SETTINGS))
    raise UnsupportedCheckpointError(
        f"{path}: quantization_config has quant_method {method!r}, supported are {', '.join(METHODS)}"
    )


class _Settings:
    """A JSON object, all of whose settings are known and have supported values."""

    def __init__(self, path: Path, name: str, values: Any, known: Mapping[str, tuple[Any, ...] | None]) -> None:
        self.path, self.name = path, name
        if not isinstance(values, dict):
            raise UnsupportedCheckpointError(f"{path}: {name} is {values!r}, must be an object")
        self.values = values
        for key, value in values.items():
            if key not in known:
                raise UnsupportedCheckpointError(f"{path}: {name}.{key} is {value!r}, which is not supported")
            allowed = known[key]
            if allowed is not None and value not in allowed:
                raise self.unsupported(key, " or ".join(repr(one) for one in allowed))

    def unsupported(self, key: str, supported: str) -> UnsupportedCheckpointError:
        value = self.values.get(key)
        return UnsupportedCheckpointError(f"{self.path}: {self.name}.{key} is {value!r}, supported is {supported}")

    def names(self, *keys: str) -> tuple[str, ...]:
        found: list[str] = []
        for key in keys:
            value = self.values.get(key) or []
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise self.unsupported(key, "a list of module names")
            found += value
        return tuple(found)

    def block(self, key: str) -> tuple[int, int]:
        value = self.values.get(key)
        if isinstance(value, list) and [type(n) for n in value] == [int, int]:
            rows, columns = value
            if rows > 0 and columns == BLOCK_COLUMNS:
                return rows, columns
        raise self.unsupported(key, f"[rows, {BLOCK_COLUMNS}]")


def _fp8(settings: _Settings) -> Quantization:
    ignored = settings.names("modules_to_not_convert", "ignored_layers")
    if settings.values.get("weight_block_size") is None:
        return Quantization("weight_scale", None, ignored)
    return Quantization("weight_scale_inv", settings.block("weight_block_size"), ignored)


def _compressed(settings: _Settings) -> Quantization:
    if scheme := settings.values.get("kv_cache_scheme"):
        _weights(settings.path, "quantization_config.kv_cache_scheme", scheme, ("tensor",))
    groups = settings.values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise settings.unsupported("config_groups", "at least one group")
    blocks = {_group(settings, name, group) for name, group in groups.items()}
    if len(blocks) > 1:
        raise settings.unsupported("config_groups", "groups with blocks of one shape, or with none")
    return Quantization("weight_scale", blocks.pop(), settings.names("ignore"))


def _group(settings: _Settings, name: str, group: Any) -> tuple[int, int] | None:
    """The block of a group of modules."""
    where = f"quantization_config.config_groups.{name}"
    known = {
        "weights": None,
        "input_activations": None,
        "targets": None,
        "output_activations": (None,),
        "format": (None, *(COMPRESSED_SETTINGS["format"] or ())),
    }
    values = _Settings(settings.path, where, group, known).values
    weights = _weights(settings.path, f"{where}.weights", values.get("weights"), STRATEGIES)
    return weights.block("block_structure") if weights.values.get("strategy") == "block" else None


def _weights(path: Path, where: str, values: Any, strategies: tuple[str, ...]) -> _Settings:
    told = ("observer", "observer_kwargs", "block_structure", "scale_dtype", "zp_dtype")
    nothing = {"actorder": (None, False), "group_size": (None,)}
    settings = _Settings(path, where, values, EIGHT_BITS | nothing | {"strategy": strategies} | dict.fromkeys(told))
    for key in ("num_bits", "type"):
        if key not in settings.values:
            raise settings.unsupported(key, repr(EIGHT_BITS[key][0]))
    return settings
