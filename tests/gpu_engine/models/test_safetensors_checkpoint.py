"""Hugging Face folders: exact weights from one or several files, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from services.gpu_engine.models.config import LinearScaling, Llama3Scaling, YarnScaling
from services.gpu_engine.models.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
)
from services.gpu_engine.models.loader import open_checkpoint
from services.gpu_engine.models.tensors import TensorType
from tests.gpu_engine.models.tiny import encode, random_weights, tiny_config, write_hugging_face
from tests.gpu_engine.models.variants import LONG_ROPE, VARIANTS

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_dtype_reads_back_exactly(tmp_path: Path, dtype: str, shards: int) -> None:
    config = tiny_config()
    weights = random_weights(config)
    write_hugging_face(tmp_path, config, weights, dtype, shards)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == config
    for spec, tensor in checkpoint.tensors():
        assert (tensor.shape, tensor.type) == (spec.shape, TensorType[dtype])
        assert tensor.data.tobytes() == encode(weights[spec.name], dtype)[0]


def test_files_of_the_formats_own_writer_are_read(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    write_hugging_face(tmp_path, config, weights)
    names = {spec.name: spec.hugging_face for spec, _ in open_checkpoint(tmp_path).tensors()}
    safetensors.numpy.save_file({names[name]: w for name, w in weights.items()}, tmp_path / "model.safetensors")
    for spec, tensor in open_checkpoint(tmp_path).tensors():
        np.testing.assert_array_equal(tensor.data.view(np.float32).reshape(spec.shape), weights[spec.name])


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope_scaling": None}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, LinearScaling(2.0)),
        ({"rope_scaling": LLAMA3}, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 10000.0}}, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            YarnScaling(4.0, 64, 0.1 * np.log(4.0) + 1),
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}}, YarnScaling(4.0, 256, 1.5)),
    ],
)
def test_rope_scaling_is_read_in_every_spelling(tmp_path: Path, changes: dict[str, Any], scaling: object) -> None:
    config = tiny_config()
    write_hugging_face(tmp_path, config, random_weights(config), **changes)
    assert open_checkpoint(tmp_path).config.rope_scaling == scaling


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["GPTNeoXForCausalLM"]}, UnsupportedCheckpointError, "architecture 'GPTNeoXForCausalLM'"),
        ({"hidden_act": "gelu"}, UnsupportedCheckpointError, "hidden_act is 'gelu', only 'silu'"),
        ({"attention_bias": True}, UnsupportedCheckpointError, "attention_bias is True"),
        ({"sliding_window": 128}, UnsupportedCheckpointError, "sliding_window is 128, below the context of 256"),
        ({"sliding_window": "wide"}, UnsupportedCheckpointError, "sliding_window is 'wide'"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            UnsupportedCheckpointError,
            "layer_types has 'sliding_attention'",
        ),
        ({"partial_rotary_factor": 0.5}, UnsupportedCheckpointError, "partial_rotary_factor is 0.5, only 1.0"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedCheckpointError, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, UnsupportedCheckpointError, "RoPE scaling 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, CorruptCheckpointError, "scaling factor is None"),
        ({"hidden_size": "64"}, CorruptCheckpointError, "hidden_size is '64', must be an integer"),
        ({"hidden_size": 32}, CorruptCheckpointError, "model.embed_tokens.weight has shape"),
        ({"num_key_value_heads": 3}, CorruptCheckpointError, "multiple of kv_heads 3"),
        ({"eos_token_id": 1 << 20}, CorruptCheckpointError, "eos id is 1048576"),
    ],
)
def test_config_faults_are_named(
    tmp_path: Path, changes: dict[str, Any], error: type[CheckpointError], message: str
) -> None:
    config = tiny_config()
    write_hugging_face(tmp_path, config, random_weights(config), **changes)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path)


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    config = tiny_config()
    write_hugging_face(tmp_path, config, random_weights(config))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype": "F32"', b'"dtype": "I32"', 1))
    with pytest.raises(UnsupportedCheckpointError, match="has dtype I32, supported are F32, F16, BF16"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("length", [0, 4, 500, -1])
def test_truncated_weights_are_corrupt(tmp_path: Path, length: int) -> None:
    config = tiny_config()
    write_hugging_face(tmp_path, config, random_weights(config))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptCheckpointError, match=r"empty|truncated"):
        open_checkpoint(tmp_path)


def test_missing_files_and_tensors_are_named(tmp_path: Path) -> None:
    config = tiny_config()
    write_hugging_face(tmp_path, config, random_weights(config), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    parsed = json.loads(index.read_text())
    for escape in ("../elsewhere.safetensors", "absent.safetensors"):
        index.write_text(json.dumps({"weight_map": parsed["weight_map"] | {"model.norm.weight": escape}}))
        with pytest.raises(CorruptCheckpointError, match=f"weight file {escape} is missing"):
            open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CorruptCheckpointError, match="tensors are missing, the first is"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps(parsed))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"tokenizer.json is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("changes", [{"sliding_window": 256}, {"sliding_window": 16, "use_sliding_window": False}])
def test_windows_that_hide_nothing_are_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tiny_config()
    write_hugging_face(tmp_path, config, random_weights(config), **changes)
    assert open_checkpoint(tmp_path).config == config


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12}


@pytest.mark.parametrize(
    ("variant", "changes", "error", "message"),
    [
        ("phi4", {"partial_rotary_factor": 0.2}, CorruptCheckpointError, "3 of head_dim 16 dimensions"),
        ("phi4", {"partial_rotary_factor": 1.5}, CorruptCheckpointError, "partial_rotary is 1.5"),
        ("phi4", {"intermediate_size": 95}, CorruptCheckpointError, "gate_up_proj.weight has shape"),
        ("phi4", {"num_key_value_heads": 4}, CorruptCheckpointError, "qkv_proj.weight has shape"),
        ("phi4-mini", {"rope_scaling": LONGROPE | {"long_factor": [2.0] * 11}}, CorruptCheckpointError, "11 long"),
        ("phi4-mini", {"rope_scaling": LONGROPE | {"short_factor": 1.0}}, CorruptCheckpointError, "short_factor must"),
        ("phi4-mini", {"rope_scaling": LONGROPE | {"long_mscale": 1.2}}, UnsupportedCheckpointError, "long_mscale"),
        ("qwen3", {"attention_bias": True}, UnsupportedCheckpointError, "attention_bias is True"),
        ("qwen3", {"head_dim": 16}, CorruptCheckpointError, "has shape"),
        ("qwen3", {"architectures": ["LlamaForCausalLM"]}, UnsupportedCheckpointError, "norm.weight has no place"),
        ("qwen3-moe", {"num_experts": 17}, CorruptCheckpointError, "tensors are missing"),
        ("qwen3-moe", {"num_experts": 15}, UnsupportedCheckpointError, "has no place"),
        ("qwen3-moe", {"num_experts_per_tok": 17}, CorruptCheckpointError, "experts per token is 17, must be 1 to 16"),
        ("qwen3-moe", {"norm_topk_prob": 1}, CorruptCheckpointError, "norm_topk_prob is 1"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, CorruptCheckpointError, "decoder_sparse_step is 0"),
        ("qwen3-moe", {"mlp_only_layers": [2]}, CorruptCheckpointError, r"mlp_only_layers is \[2\]"),
        ("qwen3-moe", {"shared_expert_intermediate_size": 8}, UnsupportedCheckpointError, "shared experts"),
    ],
)
def test_what_a_family_does_not_have_is_named(
    tmp_path: Path, variant: str, changes: dict[str, Any], error: type[CheckpointError], message: str
) -> None:
    config, settings = VARIANTS[variant]
    write_hugging_face(tmp_path, config, random_weights(config), **(settings | changes))
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path)


def test_parts_of_a_fused_tensor_are_views_of_its_rows(tmp_path: Path) -> None:
    config, settings = VARIANTS["phi4"]
    weights = random_weights(config)
    write_hugging_face(tmp_path, config, weights, "BF16", **settings)
    checkpoint = open_checkpoint(tmp_path)
    stored = {spec.name: (spec, tensor) for spec, tensor in checkpoint.tensors()}
    for name in ("attention.query", "attention.key", "attention.value", "ffn.gate", "ffn.up"):
        spec, tensor = stored[f"layers.1.{name}"]
        assert tensor.data.tobytes() == encode(weights[spec.name], "BF16")[0]
        assert tensor.data.base is not None
        assert checkpoint.tensor(spec).data.ctypes.data == tensor.data.ctypes.data
    query, key = stored["layers.0.attention.query"][1], stored["layers.0.attention.key"][1]
    assert key.data.ctypes.data == query.data.ctypes.data + query.nbytes


def test_early_names_of_longrope_are_read(tmp_path: Path) -> None:
    config, settings = VARIANTS["phi4-mini"]
    for name in ("su", "yarn"):
        rope = {"type": name, "short_factor": LONG_ROPE.short, "long_factor": LONG_ROPE.long}
        write_hugging_face(tmp_path, config, random_weights(config), **(settings | {"rope_scaling": rope}))
        assert open_checkpoint(tmp_path).config == config
