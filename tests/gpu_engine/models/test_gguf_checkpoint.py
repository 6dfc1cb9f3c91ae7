"""GGUF files: exact weights in the family's order, and one clear error for each way a file can be wrong."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from services.gpu_engine.models.config import FrequencyFactors, LinearScaling, YarnScaling
from services.gpu_engine.models.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedCheckpointError,
)
from services.gpu_engine.models.loader import open_checkpoint
from services.gpu_engine.models.tensors import TensorType
from tests.gpu_engine.models.tiny import random_weights, tiny_config, write_gguf

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"]


def write(path: Path, **options: Any) -> Path:
    config = tiny_config()
    write_gguf(path, config, random_weights(config), **options)
    return path


@pytest.mark.parametrize("name", TYPES)
def test_every_tensor_type_reads_back_exactly_and_in_hugging_face_order(tmp_path: Path, name: str) -> None:
    config, kind = tiny_config(), gguf.GGMLQuantizationType[name]
    stored = write_gguf(tmp_path / "m.gguf", config, random_weights(config), kind)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config == config
    for spec, tensor in checkpoint.tensors():
        assert tensor.shape == spec.shape
        assert tensor.type is (TensorType[name] if len(spec.shape) == 2 else TensorType.F32)
        values = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.type.name])
        np.testing.assert_array_equal(values.reshape(spec.shape), stored[spec.name], err_msg=spec.name)


def test_tied_embeddings_share_one_tensor(tmp_path: Path) -> None:
    config = tiny_config(tied_embeddings=True)
    write_gguf(tmp_path / "m.gguf", config, random_weights(config))
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config.tied_embeddings
    assert "head" not in [spec.name for spec, _ in checkpoint.tensors()]


def test_progress_reaches_the_total_and_never_falls(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf"))
    total = sum(tensor.nbytes for _, tensor in checkpoint.tensors(lambda done, all_: seen.append((done, all_))))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            YarnScaling(4.0, 64, 0.1 * np.log(4.0) + 1),
        ),
    ],
)
def test_rope_scaling_is_read(tmp_path: Path, metadata: dict[str, Any], scaling: object) -> None:
    assert open_checkpoint(write(tmp_path / "m.gguf", metadata=metadata)).config.rope_scaling == scaling


def test_every_truncation_is_a_corrupt_checkpoint(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    header = 20_000  # the header is shorter; beyond it only tensor data is cut
    lengths = [*range(0, 200), *range(200, header, 97), *range(header, len(whole) - 32, 4999)]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpointError):
            open_checkpoint(cut)


@pytest.mark.parametrize(
    ("length", "reason"), [(0, "empty"), (100, "truncated, the header"), (-4096, "truncated, tensor")]
)
def test_truncation_is_named(tmp_path: Path, length: int, reason: str) -> None:
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptCheckpointError, match=reason):
        open_checkpoint(path)


def test_wrong_magic_and_version_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(b"GGML" + content[4:])
    with pytest.raises(CorruptCheckpointError, match=r"not a GGUF file.*GGML"):
        open_checkpoint(path)
    for short in (b"G", b"no"):
        path.write_bytes(short)
        with pytest.raises(CorruptCheckpointError, match="not a GGUF file"):
            open_checkpoint(path)
    path.write_bytes(content[:4] + (9).to_bytes(4, "little") + content[8:])
    with pytest.raises(CorruptCheckpointError, match="version is 9"):
        open_checkpoint(path)


def test_hostile_counts_and_random_damage_never_escape_as_other_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    content = path.read_bytes()
    rng = np.random.default_rng(1)
    path.write_bytes(content[:16] + b"\xff" * 8 + content[24:])
    with pytest.raises(CorruptCheckpointError):
        open_checkpoint(path)
    for _ in range(300):
        damaged = bytearray(content)
        for offset in rng.integers(0, 8000, 4):
            damaged[offset] = rng.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"architecture": "mamba"}, UnsupportedCheckpointError, "architecture 'mamba' is not supported, only llama"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, UnsupportedCheckpointError, "RoPE scaling 'longrope'"),
        ({"metadata": {"llama.expert_count": 8}}, UnsupportedCheckpointError, "expert_count is 8"),
        ({"metadata": {"llama.attention.sliding_window": 8}}, UnsupportedCheckpointError, "attention.sliding_window"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, UnsupportedCheckpointError, "rope.dimension_count is 8"),
        ({"metadata": {"split.count": 3}}, UnsupportedCheckpointError, "split files"),
        ({"metadata": {"tokenizer.ggml.pre": "new"}}, UnsupportedCheckpointError, "tokenizer.ggml.pre is 'new'"),
        ({"tokenizer": False}, UnsupportedCheckpointError, "tokenizer.ggml.model is None"),
        ({"kind": gguf.GGMLQuantizationType.Q5_0}, UnsupportedCheckpointError, r"token_embd.weight has GGML type Q5_0"),
    ],
)
def test_what_is_unsupported_is_named(
    tmp_path: Path, options: dict[str, Any], error: type[CheckpointError], message: str
) -> None:
    path = write(tmp_path / "m.gguf", **options)
    with pytest.raises(error, match=re.escape(str(path)) + ".*" + message):
        open_checkpoint(path)


def test_a_bias_is_refused_rather_than_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", extra={"blk.0.attn_q.bias": np.zeros(64, np.float32)})
    with pytest.raises(UnsupportedCheckpointError, match=r"tensor blk.0.attn_q.bias has no place in the llama family"):
        open_checkpoint(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_up.wrongs"))
    with pytest.raises(CorruptCheckpointError, match=r"1 tensors are missing, the first is blk.1.ffn_up.weight"):
        open_checkpoint(path)


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    weights["layers.0.ffn.up"] = weights["layers.0.ffn.up"][:64]
    write_gguf(tmp_path / "m.gguf", config, weights)
    with pytest.raises(CorruptCheckpointError, match=r"blk.0.ffn_up.weight has shape \(64, 64\), .* \(96, 64\)"):
        open_checkpoint(tmp_path / "m.gguf")


def test_frequency_factors_become_the_scaling(tmp_path: Path) -> None:
    config = tiny_config()
    writer_path = tmp_path / "m.gguf"
    factors = np.linspace(1, 8, config.head_dim // 2, dtype=np.float32)
    write_gguf(writer_path, config, random_weights(config), extra={"rope_freqs.weight": factors})
    assert open_checkpoint(writer_path).config.rope_scaling == FrequencyFactors(tuple(factors.tolist()))


def test_the_path_may_be_a_folder_with_one_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="neither"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="neither"):
        open_checkpoint(tmp_path / "absent")
    first = write(tmp_path / "a.gguf")
    assert open_checkpoint(tmp_path).path == first
    write(tmp_path / "b.gguf")
    with pytest.raises(CheckpointNotFoundError, match="holds 2 GGUF files"):
        open_checkpoint(tmp_path)


def replace_number(path: Path, key: str, value: int) -> None:
    """Overwrite a 32-bit number of the metadata, as damage would."""
    content = bytearray(path.read_bytes())
    start = content.index(key.encode()) + len(key) + 4  # past the value's type
    content[start : start + 4] = value.to_bytes(4, "little")
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", 1 << 24, "layers is 16777216, must be 1 to 4096"),
        ("llama.attention.head_count_kv", 3, "heads is 4, must be a multiple of kv_heads 3"),
        ("llama.vocab_size", 1 << 31, "vocabulary is 2147483648"),
        ("tokenizer.ggml.eos_token_id", 1 << 30, "eos id is 1073741824"),
    ],
)
def test_impossible_sizes_are_refused_at_once_naming_file_and_value(
    tmp_path: Path, key: str, value: int, message: str
) -> None:
    path = write(tmp_path / "m.gguf")
    replace_number(path, key, value)
    with pytest.raises(CorruptCheckpointError, match=re.escape(f"{path}: model {message}")):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        ({"split.count": "three"}, "split.count"),
        ({"tokenizer.ggml.eot_token_id": "one"}, "tokenizer.ggml.eot_token_id"),
        ({"tokenizer.ggml.pre": 7}, "tokenizer.ggml.pre"),
    ],
)
def test_metadata_of_another_type_is_named(tmp_path: Path, metadata: dict[str, Any], key: str) -> None:
    path = write(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=re.escape(str(path)) + ".*" + re.escape(key)):
        open_checkpoint(path)
