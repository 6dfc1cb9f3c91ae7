"""What a gateway needs to tokenize: the Hugging Face tokenizer.json, the chat template and the special tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from services.gpu_engine.models.errors import CorruptCheckpointError


@dataclass(frozen=True)
class TokenizerFiles:
    """A model's tokenizer.

    Attributes:
        json: Hugging Face tokenizer.json.
        chat_template: Jinja source; empty when the model has none.
        bos_token, eos_token: as text, for the template; empty when the model has none.
        unencodable_bytes: bytes of UTF-8 text that no token expresses, ascending. The tokenizer would drop them in
            silence, so text that holds one must be refused (docs/decisions/0003-bytes-without-a-token.md).
    """

    json: bytes
    chat_template: str
    bos_token: str
    eos_token: str
    unencodable_bytes: bytes


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE vocabularies (GPT-2's mapping)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def unencodable_bytes(tokenizer_json: bytes) -> bytes:
    """Bytes that a byte-level tokenizer has no token for; empty for tokenizers of other kinds.

    Raises:
        CorruptCheckpointError: not a tokenizer.json.
    """
    try:
        parsed: dict[str, Any] = json.loads(tokenizer_json)
        vocabulary = parsed["model"]["vocab"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"tokenizer.json is not a Hugging Face tokenizer: {error!r}") from error
    if not _is_byte_level(parsed.get("pre_tokenizer")):
        return b""
    return bytes(byte for byte, character in enumerate(byte_alphabet()) if character not in vocabulary)


def _is_byte_level(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return any(part.get("type") == "ByteLevel" for part in parts)
