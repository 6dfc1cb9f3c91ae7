"""Tokenizers rebuilt from GGUF metadata encode as the original does; bytes without a token are known beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.errors import CorruptCheckpointError
from services.gpu_engine.models.loader import open_checkpoint
from services.gpu_engine.models.tokenizer import byte_alphabet, unencodable_bytes
from tests.gpu_engine.models.tiny import (
    MISSING_BYTE,
    SPECIAL,
    random_weights,
    tiny_config,
    write_gguf,
    write_hugging_face,
)


@pytest.fixture(params=["gguf", "hugging_face"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    config = tiny_config()
    if request.param == "gguf":
        write_gguf(tmp_path / "m.gguf", config, random_weights(config))
    else:
        write_hugging_face(tmp_path, config, random_weights(config))
    return open_checkpoint(tmp_path)


def test_the_byte_alphabet_is_one_to_one_and_keeps_ascii() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert alphabet[ord("A")] == "A"
    assert alphabet[ord(" ")] == "Ġ"
    assert alphabet[ord("\n")] == "Ċ"


def test_text_merges_and_special_tokens_round_trip(tiny: Checkpoint) -> None:
    tokenizer = Tokenizer.from_buffer(tiny.tokenizer.json)
    encoded = tokenizer.encode(f"{SPECIAL[0]}hello wörld 😀{SPECIAL[1]}")
    assert encoded.tokens[:4] == [SPECIAL[0], "hel", "l", "o"]
    assert encoded.ids[-1] == 1
    assert tokenizer.decode(encoded.ids) == "hello wörld 😀"
    assert (tiny.tokenizer.bos_token, tiny.tokenizer.eos_token) == tuple(SPECIAL)
    assert tiny.tokenizer.chat_template.startswith("{{ messages")


def test_a_byte_without_a_token_is_listed(tiny: Checkpoint) -> None:
    assert tiny.tokenizer.unencodable_bytes == bytes([MISSING_BYTE])
    tokenizer = Tokenizer.from_buffer(tiny.tokenizer.json)
    for byte in range(128):
        assert bool(tokenizer.encode(chr(byte)).ids) == (byte != MISSING_BYTE)


def test_what_is_no_tokenizer_is_refused() -> None:
    for content in (b"", b"{}", b"[]", b'{"model": 1}'):
        with pytest.raises(CorruptCheckpointError, match=r"tokenizer.json"):
            unencodable_bytes(content)


@pytest.mark.model
def test_smollm2_lacks_21_bytes_and_encodes_all_else(smollm2: Checkpoint) -> None:
    lacking = smollm2.tokenizer.unencodable_bytes
    assert lacking.hex(" ") == "04 06 13 14 16 1d c0 c1 f1 f2 f5 f6 f7 f8 f9 fa fb fc fd fe ff"
    tokenizer = Tokenizer.from_buffer(smollm2.tokenizer.json)
    characters = [chr(point) for point in (*range(0xD800), *range(0xE000, 0x20000)) if point % 7 == 0 or point < 0x3000]
    text = "".join(c for c in characters if not set(c.encode()) & set(lacking))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_smollm2_splits_every_digit(smollm2: Checkpoint) -> None:
    tokens = Tokenizer.from_buffer(smollm2.tokenizer.json).encode("<|im_start|>user\nIn 2024, 1e10").tokens
    assert tokens == ["<|im_start|>", "user", "Ċ", "In", "Ġ", "2", "0", "2", "4", ",", "Ġ", "1", "e", "1", "0"]
