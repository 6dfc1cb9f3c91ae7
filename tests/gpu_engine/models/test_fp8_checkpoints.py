"""FP8 folders: what is stored times its scale in every way of writing it, and clear refusals of every other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.gpu_engine.models.config import MixtureConfig, ModelConfig
from services.gpu_engine.models.dequantize import dequantize
from services.gpu_engine.models.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError
from services.gpu_engine.models.fp8_weights import Fp8Weights, quantized_specs
from services.gpu_engine.models.loader import open_checkpoint
from services.gpu_engine.models.safetensors_file import SafetensorsFile
from services.gpu_engine.models.tensors import TensorType
from tests.gpu_engine.models.fp8 import BLOCKS, STYLES, Style, compressed, wide_config, write_fp8
from tests.gpu_engine.models.tiny import random_weights, write_hugging_face, write_safetensors

MODELS = {
    "llama": wide_config(),
    "llama, tied": wide_config(tied_embeddings=True),
    "phi3, fused and cut inside a block": wide_config("phi3"),
    "qwen3": wide_config("qwen3"),
    "qwen3_moe": wide_config("qwen3_moe", mixture=MixtureConfig(16, 4, 160, normalized=True)),
}
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def write(folder: Path, style: Style = STYLES["channel"], config: ModelConfig = MODELS["llama"]) -> Any:
    return write_fp8(folder, config, random_weights(config), style)


def change_tensors(folder: Path, change: Any) -> None:
    file = SafetensorsFile(folder / "model.safetensors")
    tensors: Tensors = {
        name: (entry.dtype, entry.shape, file.bytes_of(entry).tobytes()) for name, entry in file.tensors.items()
    }
    change(tensors)
    write_safetensors(folder / "changed.safetensors", tensors)
    (folder / "changed.safetensors").replace(folder / "model.safetensors")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("style", STYLES)
def test_tensors_are_worth_their_codes_times_their_scales(tmp_path: Path, style: str, model: str) -> None:
    config = MODELS[model]
    worth = write(tmp_path, STYLES[style], config)
    checkpoint = open_checkpoint(tmp_path)
    quantized = {spec.name for spec in quantized_specs(checkpoint.layers)}
    for spec, tensor in checkpoint.tensors():
        assert (tensor.type is TensorType.F8_E4M3) == (spec.name in quantized)
        rows = tensor.data.shape[0]
        got = np.concatenate([dequantize(tensor, 0, 3), dequantize(tensor, 3, rows)])
        np.testing.assert_array_equal(got.reshape(spec.shape), worth[spec.name])


REFUSED: dict[str, tuple[Style, dict[str, Any], str]] = {
    "another method": (
        STYLES["block"],
        {"quant_method": "awq"},
        "quant_method 'awq', supported are compressed-tensors",
    ),
    "e5m2": (STYLES["block"], {"fmt": "e5m2"}, "fmt is 'e5m2', supported is 'e4m3'"),
    "narrow blocks": (STYLES["block"], {"weight_block_size": [128, 64]}, r"weight_block_size is \[128, 64\]"),
    "powers of two": (STYLES["block"], {"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0', which is not supported"),
    "another format": (STYLES["channel"], {"format": "pack-quantized"}, "format is 'pack-quantized'"),
    "a group of 4 bits": (
        STYLES["channel"],
        compressed("channel", num_bits=4),
        "config_groups.group_0.weights.num_bits is 4, supported is 8",
    ),
    "integers": (STYLES["channel"], compressed("channel", type="int"), "weights.type is 'int'"),
    "groups along the inputs": (
        STYLES["channel"],
        compressed("group", group_size=128),
        "weights.group_size is 128|weights.strategy is 'group'",
    ),
    "asymmetric": (STYLES["channel"], compressed("channel", symmetric=False), "symmetric is False"),
    "sparse": (STYLES["channel"], {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is"),
    "rotations": (STYLES["channel"], {"transform_config": {"config_groups": {}}}, "transform_config is"),
    "no groups": (STYLES["channel"], {"config_groups": {}}, "config_groups is {}"),
    "an integer cache": (
        STYLES["channel"],
        {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        "kv_cache_scheme.type is 'int'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_its_name(tmp_path: Path, case: str) -> None:
    style, changes, message = REFUSED[case]
    write(tmp_path, style)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"] |= changes
    path.write_text(json.dumps(values))
    with pytest.raises(UnsupportedCheckpointError, match=message):
        open_checkpoint(tmp_path)


GATE = "model.layers.1.mlp.gate_proj"


def drop_scale(tensors: Tensors) -> None:
    del tensors[f"{GATE}.weight_scale"]


def nan_scale(tensors: Tensors) -> None:
    dtype, shape, data = tensors[f"{GATE}.weight_scale"]
    tensors[f"{GATE}.weight_scale"] = (dtype, shape, b"\xff" * len(data))


def short_scale(tensors: Tensors) -> None:
    dtype, (rows, _), data = tensors[f"{GATE}.weight_scale"]
    tensors[f"{GATE}.weight_scale"] = (dtype, (rows - 1, 1), data[:-2])


def scale_in_fp8(tensors: Tensors) -> None:
    _, shape, data = tensors[f"{GATE}.weight_scale"]
    tensors[f"{GATE}.weight_scale"] = ("F8_E4M3", shape, data[::2])


def zero_point(tensors: Tensors) -> None:
    tensors[f"{GATE}.weight_zero_point"] = ("F32", (1,), bytes(4))


def fp8_norm(tensors: Tensors) -> None:
    _, shape, data = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = ("F8_E4M3", shape, data[::2])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (drop_scale, CorruptCheckpointError, f"tensor {GATE}.weight_scale is missing"),
        (nan_scale, CorruptCheckpointError, f"{GATE}.weight_scale has a scale that is not a positive number"),
        (short_scale, CorruptCheckpointError, r"has shape \(319, 1\), must be \(320, 1\) or \(1,\)"),
        (scale_in_fp8, UnsupportedCheckpointError, f"{GATE}.weight_scale has dtype F8_E4M3"),
        (zero_point, UnsupportedCheckpointError, f"{GATE}.weight_zero_point has no place"),
        (fp8_norm, UnsupportedCheckpointError, "model.norm.weight has dtype F8_E4M3"),
    ],
)
def test_tensors_that_contradict_the_config_are_named(
    tmp_path: Path, change: Any, error: type[CheckpointError], message: str
) -> None:
    write(tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("ignored", [GATE, r"re:.*gate_proj"])
def test_an_ignored_module_is_not_fp8_and_one_in_bf16_is_read_as_such(tmp_path: Path, ignored: str) -> None:
    config = MODELS["llama"]
    weights = random_weights(config)
    style = STYLES["channel"]
    ignoring = Style(1, 0, "weight_scale", "BF16", style.config | {"ignore": [ignored]})
    write_fp8(tmp_path, config, weights, ignoring)
    with pytest.raises(CorruptCheckpointError, match=r"quantization_config says that model.layers.[01].mlp.gate_proj"):
        open_checkpoint(tmp_path)
    write_hugging_face(tmp_path, config, weights, "BF16", quantization_config=ignoring.config)
    assert {tensor.type for _, tensor in open_checkpoint(tmp_path).tensors()} == {TensorType.BF16}


def test_fp8_without_a_quantization_config_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "quantization_config"}))
    with pytest.raises(UnsupportedCheckpointError, match="weight_scale has no place"):
        open_checkpoint(tmp_path)


def test_scales_of_the_kv_cache_are_one_or_what_is_stored(tmp_path: Path) -> None:
    style = Style(
        1,
        0,
        "weight_scale",
        "BF16",
        STYLES["channel"].config | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
    )
    write(tmp_path, style)
    assert open_checkpoint(tmp_path).kv_scales(1) == (1.0, 1.0)

    def add(tensors: Tensors) -> None:
        tensors["model.layers.1.self_attn.k_scale"] = ("F32", (1,), np.float32(0.25).tobytes())
        tensors["model.layers.1.self_attn.v_scale"] = ("BF16", (), b"\x00\x40")

    change_tensors(tmp_path, add)
    checkpoint = open_checkpoint(tmp_path)
    assert [checkpoint.kv_scales(layer) for layer in range(2)] == [(1.0, 1.0), (0.25, 2.0)]


def test_quantizing_at_load_touches_matrices_alone_and_makes_another_model(tmp_path: Path) -> None:
    config = MODELS["qwen3_moe"]
    write_hugging_face(tmp_path, config, random_weights(config), "BF16")
    plain = open_checkpoint(tmp_path)
    quantized = Fp8Weights(plain)
    assert quantized.fingerprint != plain.fingerprint
    assert quantized.stored_bytes() == sum(tensor.nbytes for _, tensor in quantized.tensors())
    names = {spec.name for spec in quantized_specs(plain.layers)}
    assert len(names) == 2 * (4 + 3 * 16)
    for spec, tensor in quantized.tensors():
        before = dequantize(plain.tensor(spec), 0, tensor.data.shape[0])
        after = dequantize(tensor, 0, tensor.data.shape[0])
        if spec.name in names:
            assert tensor.scale
            assert tensor.scale.values.shape == (spec.shape[0], 1)
            np.testing.assert_allclose(after, before, rtol=2.0**-4, atol=np.abs(before).max() * 2.0**-17)
        else:
            np.testing.assert_array_equal(after, before)


def test_what_is_fp8_already_is_not_quantized_again(tmp_path: Path) -> None:
    write(tmp_path, STYLES["block"])
    plain = open_checkpoint(tmp_path)
    for (_, before), (_, after) in zip(plain.tensors(), Fp8Weights(plain).tensors(), strict=True):
        assert (before.type, before.data.tobytes()) == (after.type, after.data.tobytes())


def test_blocks_of_deepseek_name_their_scale_as_what_multiplies(tmp_path: Path) -> None:
    config = MODELS["llama"]
    weights = random_weights(config)
    write_fp8(tmp_path, config, weights, STYLES["block"])
    assert STYLES["block"].config is BLOCKS
    checkpoint = open_checkpoint(tmp_path)
    spec = next(quantized_specs(checkpoint.layers))
    near = dequantize(checkpoint.tensor(spec), 0, spec.shape[0])
    np.testing.assert_allclose(near, weights[spec.name], rtol=0.08, atol=1e-3)
