"""tokenizer.json out of GGUF metadata, for byte-level BPE vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.gpu_engine.models.errors import CorruptCheckpointError, UnsupportedCheckpointError
from services.gpu_engine.models.tokenizer import TokenizerFiles, unencodable_bytes

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
# How text is split before merging, by tokenizer.ggml.pre. Only what has been compared with the original is listed.
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
}


def tokenizer_from_gguf(path: Path, metadata: dict[str, Any]) -> TokenizerFiles:
    """Build the tokenizer of a GGUF file.

    Raises:
        CorruptCheckpointError: vocabulary, merges or token types are missing or disagree.
        UnsupportedCheckpointError: another kind of tokenizer, or an unknown way to split text.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedCheckpointError(f"{path}: tokenizer.ggml.model is {kind!r}, only 'gpt2' is supported")
    split = metadata.get("tokenizer.ggml.pre")
    if split not in PRE_TOKENIZERS:
        raise UnsupportedCheckpointError(
            f"{path}: tokenizer.ggml.pre is {split!r}, supported are {', '.join(PRE_TOKENIZERS)}"
        )
    tokens = _list(path, metadata, "tokens", str)
    types = _list(path, metadata, "token_type", int)
    merges = _list(path, metadata, "merges", str)
    if len(types) != len(tokens):
        raise CorruptCheckpointError(f"{path}: {len(tokens)} tokens but {len(types)} token types")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CorruptCheckpointError(f"{path}: the vocabulary holds a token twice")
    pairs = [merge.split(" ") for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise CorruptCheckpointError(f"{path}: merge {merge!r} does not join two tokens into a third")
    tokenizer_json = _tokenizer_json(vocabulary, types, pairs, PRE_TOKENIZERS[split])
    return TokenizerFiles(
        json=tokenizer_json,
        chat_template=_template(path, metadata),
        bos_token=_token(path, metadata, tokens, "bos_token_id"),
        eos_token=_token(path, metadata, tokens, "eos_token_id"),
        unencodable_bytes=unencodable_bytes(tokenizer_json),
    )


def _tokenizer_json(
    vocabulary: dict[str, int], types: list[int], merges: list[list[str]], pre_tokenizer: dict[str, Any]
) -> bytes:
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for (token, index), kind in zip(vocabulary.items(), types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _list(path: Path, metadata: dict[str, Any], name: str, kind: type[Any]) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list):
        raise CorruptCheckpointError(f"{path}: tokenizer.ggml.{name} is missing")
    if not all(type(item) is kind for item in value):
        raise CorruptCheckpointError(f"{path}: tokenizer.ggml.{name} must hold items of type {kind.__name__} alone")
    return value


def _template(path: Path, metadata: dict[str, Any]) -> str:
    template = metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise CorruptCheckpointError(f"{path}: tokenizer.chat_template is {template!r}, must be a string")
    return template


def _token(path: Path, metadata: dict[str, Any], tokens: list[str], name: str) -> str:
    index = metadata.get(f"tokenizer.ggml.{name}")
    if index is None:
        return ""
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise CorruptCheckpointError(f"{path}: tokenizer.ggml.{name} is {index!r}, must be below {len(tokens)}")
    return tokens[index]
