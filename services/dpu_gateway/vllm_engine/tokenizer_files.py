"""A model's tokenizer as the folder of files that Hugging Face's libraries read, zipped."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator

from blink.v1 import bootstrap_pb2
from smg_grpc_proto.generated import common_pb2

CHUNK_BYTES = 64 << 10
MADE_AT = (1980, 1, 1, 0, 0, 0)  # the same bytes for the same model, so the fingerprint is one too


def zipped(card: bootstrap_pb2.ModelCard) -> bytes:
    """tokenizer.json as it is, tokenizer_config.json and config.json made from the card."""
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("chat_template", "bos_token", "eos_token"):
        if getattr(card, name):
            config[name] = getattr(card, name)
    eos = list(card.eos_token_ids)
    files = {
        "tokenizer.json": card.tokenizer_json,
        "tokenizer_config.json": json.dumps(config).encode(),
        "config.json": json.dumps({"model_type": card.architecture, "eos_token_id": eos}).encode(),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, MADE_AT), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def chunks(data: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """The last one carries the SHA-256 of the whole."""
    for start in range(0, len(data), CHUNK_BYTES):
        last = start + CHUNK_BYTES >= len(data)
        digest = hashlib.sha256(data).hexdigest() if last else ""
        yield common_pb2.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES], sha256=digest)
