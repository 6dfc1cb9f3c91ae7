"""Tiny checkpoints with random weights: any family as a Hugging Face folder, Llama as GGUF too by its own writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.models.checkpoint import FAMILIES
from services.gpu_engine.models.config import LongRopeScaling, ModelConfig
from services.gpu_engine.models.family import TensorSpec, tensors_of
from services.gpu_engine.models.hugging_face_config import ARCHITECTURES
from services.gpu_engine.models.tokenizer import byte_alphabet

Weights = dict[str, NDArray[np.float32]]

SPECIAL = ["<|start|>", "<|end|>"]
MISSING_BYTE = 0x04


def vocabulary() -> list[str]:
    """Two special tokens, all bytes but one, and two merged tokens."""
    return SPECIAL + [c for b, c in enumerate(byte_alphabet()) if b != MISSING_BYTE] + ["he", "hel"]


MERGES = ["h e", "he l"]


def tiny_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": "llama",
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn": 96,
        "vocabulary": len(vocabulary()),
        "context": 256,
        "norm_eps": 2.0**-17,  # exact in float32, as GGUF stores it
        "rope_base": 10000.0,
        "rope_scaling": None,
        "tied_embeddings": False,
        "eos_ids": (1,),
    }
    return ModelConfig(**(values | changes))


def random_weights(config: ModelConfig, seed: int = 0) -> Weights:
    """Weights by canonical name, rotary pairs half a head apart."""
    rng = np.random.default_rng(seed)
    weights = {}
    for spec in tensors_of(FAMILIES[config.architecture](config)):
        if len(spec.shape) == 1:
            weights[spec.name] = rng.uniform(0.5, 1.5, spec.shape).astype(np.float32)
        else:
            weights[spec.name] = (rng.standard_normal(spec.shape) / np.sqrt(spec.shape[1])).astype(np.float32)
    return weights


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: Weights,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    architecture: str = "llama",
    tokenizer: bool = True,
    extra: Weights | None = None,
) -> Weights:
    """Write a GGUF file; matrices are quantized as ``kind``. Returns the values that the file really holds."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_vocab_size(config.vocabulary)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    if tokenizer:
        tokens = vocabulary()
        writer.add_tokenizer_model("gpt2")
        if "tokenizer.ggml.pre" not in (metadata or {}):
            writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template("{{ messages[0].content }}")
    stored = {}
    for spec in tensors_of(FAMILIES[config.architecture](config)):
        values = weights[spec.name]
        if spec.rotary_heads:  # the order in which convert_hf_to_gguf.py leaves q and k
            rows, columns = values.shape
            halves = values.reshape(spec.rotary_heads, 2, rows // spec.rotary_heads // 2, columns)
            values = halves.swapaxes(1, 2).reshape(rows, columns)
        if values.ndim == 1:
            writer.add_tensor(spec.gguf, values)
            stored[spec.name] = values
            continue
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(spec.gguf, data, raw_dtype=kind)
        stored[spec.name] = gguf.quants.quantize(weights[spec.name], kind)
        stored[spec.name] = gguf.quants.dequantize(stored[spec.name], kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def hugging_face_config(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    values = {
        "architectures": [name for name, family in ARCHITECTURES.items() if family == config.architecture],
        "model_type": config.architecture,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.context,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "tie_word_embeddings": config.tied_embeddings,
        "vocab_size": config.vocabulary,
        "eos_token_id": list(config.eos_ids),
        "pad_token_id": None,  # transformers has defaults beyond this vocabulary
    }
    if config.partial_rotary != 1:
        values["partial_rotary_factor"] = config.partial_rotary
    if isinstance(scaling := config.rope_scaling, LongRopeScaling):
        values["original_max_position_embeddings"] = scaling.original_context
        values["rope_scaling"] = {"type": "longrope", "short_factor": scaling.short, "long_factor": scaling.long}
    if mixture := config.mixture:
        values |= {
            "num_experts": mixture.experts,
            "num_experts_per_tok": mixture.per_token,
            "moe_intermediate_size": mixture.ffn,
            "norm_topk_prob": mixture.normalized,
            "mlp_only_layers": list(mixture.dense_layers),
        }
    return values | changes


def write_hugging_face(
    folder: Path, config: ModelConfig, weights: Weights, dtype: str = "F32", shards: int = 1, **changes: Any
) -> Weights:
    """Write a Hugging Face folder; ``changes`` go into config.json. Returns the values that the files really hold."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hugging_face_config(config, **changes)))
    tokens = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": tokens, "merges": [merge.split() for merge in MERGES]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": SPECIAL[0], "eos_token": {"content": SPECIAL[1]}, "chat_template": "{{ messages }}"})
    )
    stored, files = {}, [dict[str, tuple[str, tuple[int, ...], bytes]]() for _ in range(shards)]
    fused = dict[str, list[TensorSpec]]()
    for spec in tensors_of(FAMILIES[config.architecture](config)):
        fused.setdefault(spec.hugging_face, []).append(spec)
    for index, (name, specs) in enumerate(fused.items()):
        assert [spec.first_row for spec in specs] == [sum(s.shape[0] for s in specs[:i]) for i in range(len(specs))]
        data = b""
        for spec in specs:
            encoded, stored[spec.name] = encode(weights[spec.name], dtype)
            data += encoded
        files[index % shards][name] = (dtype, specs[0].stored_shape, data)
    names = [f"model-{index + 1:05}-of-{shards:05}.safetensors" for index in range(shards)]
    if shards == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {name: names[index] for index, file in enumerate(files) for name in file}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, file in zip(names, files, strict=True):
        write_safetensors(folder / name, file)
    return stored


def encode(values: NDArray[np.float32], dtype: str) -> tuple[bytes, NDArray[np.float32]]:
    """Values as bytes of a safetensors dtype, and what those bytes are worth."""
    if dtype == "F32":
        return values.tobytes(), values
    if dtype == "F16":
        half = values.astype(np.float16)
        return half.tobytes(), half.astype(np.float32)
    assert dtype == "BF16"
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits.tobytes(), (bits.astype(np.uint32) << 16).view(np.float32)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    header = json.dumps(table).encode()
    body = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)
