"""Tiny FP8 checkpoints in every way of writing scales that is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.models.checkpoint import FAMILIES
from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.family import TensorSpec, tensors_of
from services.gpu_engine.models.float8 import VALUES, to_e4m3
from services.gpu_engine.models.fp8_weights import quantized_specs
from tests.gpu_engine.models.tiny import Weights, encode, tiny_config, write_hugging_face, write_safetensors

WIDE = {"hidden": 256, "ffn": 320, "heads": 4, "kv_heads": 2, "head_dim": 48}  # no multiples of a block's 128
WEIGHTS_8_BIT = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "dynamic": False,
    "group_size": None,
    "observer": "minmax",
}


@dataclass(frozen=True)
class Style:
    """How scales are stored: the rows and columns that share one, 0 for all; and what config.json says."""

    rows: int
    columns: int
    suffix: str
    dtype: str
    config: dict[str, Any]

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        if not self.rows:
            return ()
        return -(-rows // self.rows), -(-columns // (self.columns or columns))


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}
    group = {
        "weights": WEIGHTS_8_BIT | {"strategy": strategy} | weights,
        "input_activations": activations,
        "output_activations": None,
        "targets": ["Linear"],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        "version": "0.12.2",
    }


BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
}
STYLES = {
    "channel": Style(1, 0, "weight_scale", "BF16", compressed("channel")),
    "tensor": Style(0, 0, "weight_scale", "F32", compressed("tensor")),
    "compressed block": Style(128, 128, "weight_scale", "F32", compressed("block", block_structure=[128, 128])),
    "block": Style(128, 128, "weight_scale_inv", "BF16", BLOCKS),
    "auto": Style(
        0, 0, "weight_scale", "F32", {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": []}
    ),
}


def wide_config(architecture: str = "llama", **changes: Any) -> ModelConfig:
    return tiny_config(architecture=architecture, **(WIDE | changes))


def write_fp8(folder: Path, config: ModelConfig, weights: Weights, style: Style, **changes: Any) -> Weights:
    """Write a Hugging Face folder with FP8 matrices. Returns what its tensors are worth, in float32."""
    worth = write_hugging_face(folder, config, weights, "BF16", quantization_config=style.config, **changes)
    layers = FAMILIES[config.architecture](config)
    quantized = {spec.name for spec in quantized_specs(layers)}
    parts: dict[str, list[TensorSpec]] = {}
    for spec in tensors_of(layers):
        parts.setdefault(spec.hugging_face, []).append(spec)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, specs in parts.items():
        values = np.concatenate([worth[spec.name] for spec in specs])
        if specs[0].name not in quantized:
            tensors[name] = ("BF16", values.shape, encode(values, "BF16")[0])
            continue
        codes, scales = quantize(values, style)
        stored = style.shape(*values.shape)
        scale_bytes, scales = encode(scales, style.dtype)
        tensors[name] = ("F8_E4M3", values.shape, codes(scales).tobytes())
        tensors[f"{name.removesuffix('weight')}{style.suffix}"] = (style.dtype, stored, scale_bytes)
        if style.config.get("activation_scheme") == "static":
            tensors[f"{name.removesuffix('weight')}input_scale"] = ("F32", (1,), np.float32(1).tobytes())
        whole = VALUES[codes(scales)] * spread(scales, style, values.shape)
        for spec in specs:
            worth[spec.name] = whole[spec.first_row : spec.first_row + spec.shape[0]]
    write_safetensors(folder / "model.safetensors", tensors)
    return worth


def quantize(values: NDArray[np.float32], style: Style) -> tuple[Any, NDArray[np.float32]]:
    """Codes as a function of the scales as they are stored, and the scales."""
    rows, columns = style.rows or values.shape[0], style.columns or values.shape[1]
    scales = np.array(
        [
            [np.abs(values[i : i + rows, j : j + columns]).max() / 440 for j in range(0, values.shape[1], columns)]
            for i in range(0, values.shape[0], rows)
        ],
        np.float32,
    )
    return (lambda stored: to_e4m3(values / spread(stored, style, values.shape))), scales


def spread(scales: NDArray[np.float32], style: Style, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Each value's scale."""
    rows, columns = style.rows or shape[0], style.columns or shape[1]
    return scales.repeat(rows, 0)[: shape[0]].repeat(columns, 1)[:, : shape[1]]


def change_config(folder: Path, **changes: Any) -> None:
    """Change settings of quantization_config."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"] |= changes
    path.write_text(json.dumps(values))
