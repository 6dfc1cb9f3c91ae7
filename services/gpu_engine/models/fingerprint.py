"""A model's identity, quick enough to compute at every start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.family import TensorSpec
from services.gpu_engine.models.tensors import StoredTensor
from services.gpu_engine.models.tokenizer import TokenizerFiles

SAMPLE_BYTES = 4096


def fingerprint(
    config: ModelConfig, tokenizer: TokenizerFiles, tensors: Iterable[tuple[TensorSpec, StoredTensor]]
) -> str:
    """SHA-256, lowercase hexadecimal, over all that decides what the model answers.

    Covered: the whole config, tokenizer.json, chat template and special tokens; each tensor's name, shape, type
    and scales; and of each tensor's data the first, middle and last 4 KiB (all of it when shorter than 12 KiB, so every
    norm).
    Two models that differ only elsewhere in their data share a fingerprint; whole files are checked when downloaded.
    """
    digest = hashlib.sha256(json.dumps(config.as_dict(), sort_keys=True).encode())
    for text in (
        tokenizer.json,
        *(t.encode() for t in (tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)),
    ):
        digest.update(hashlib.sha256(text).digest())
    for spec, tensor in tensors:
        digest.update(f"{spec.name}:{tensor.shape}:{tensor.type.name}".encode())
        if tensor.scale:
            digest.update(f"{tensor.scale.rows}:{tensor.scale.columns}:{tensor.scale.first_row}".encode())
            digest.update(tensor.scale.values.tobytes())
        data = tensor.data.reshape(-1)
        if data.size <= 3 * SAMPLE_BYTES:
            digest.update(data.tobytes())
        else:
            for start in (0, (data.size - SAMPLE_BYTES) // 2, data.size - SAMPLE_BYTES):
                digest.update(data[start : start + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()
