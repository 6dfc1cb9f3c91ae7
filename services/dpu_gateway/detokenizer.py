"""Turns token ids into text as they come: whole characters only, nothing held back that is final."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from services.common.errors import BlinkError


class UnsupportedTokenizerError(BlinkError):
    """The model's tokenizer cannot be decoded incrementally."""


def byte_of_char() -> dict[str, int]:
    """The byte that each character stands for in a byte-level vocabulary (GPT-2's printable alphabet)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


class DecodeTable:
    """What each token id of a byte-level vocabulary stands for; shared by all streams.

    ``texts[id]`` is the token's text when its bytes are whole characters, None when they are only part of one.
    ``bytes_of[id]`` are its bytes. Special tokens have no text. Built once and compared, token by token, with what the
    tokenizer itself decodes.

    Raises UnsupportedTokenizerError when the tokenizer is not byte-level, or decodes differently.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoder = json.loads(tokenizer.to_str())["decoder"]
        kinds = _decoder_kinds(decoder)
        if kinds != ["ByteLevel"]:
            raise UnsupportedTokenizerError(f"the tokenizer's decoder is {kinds or None}, only ByteLevel is supported")
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        size = max(vocabulary.values(), default=-1) + 1
        self.bytes_of: list[bytes] = [b""] * size
        byte_of = byte_of_char()
        for token, index in vocabulary.items():
            if index not in special:
                self.bytes_of[index] = _token_bytes(token, byte_of)
        self.texts: list[str | None] = [_whole_text(data) for data in self.bytes_of]
        self._check(tokenizer)

    def extend_to(self, vocabulary_size: int) -> None:
        """Give the ids between the tokenizer's last and the model's no text, as the tokenizer itself does."""
        missing = vocabulary_size - len(self.texts)
        if missing > 0:
            self.texts.extend([""] * missing)
            self.bytes_of.extend([b""] * missing)

    def _check(self, tokenizer: Tokenizer) -> None:
        decoded = tokenizer.decode_batch([[index] for index in range(len(self.texts))], skip_special_tokens=True)
        for index, text in enumerate(decoded):
            if text != self.bytes_of[index].decode(errors="replace"):
                raise UnsupportedTokenizerError(
                    f"token {index} decodes to {text!r}, its bytes are {self.bytes_of[index]!r}"
                )


class Detokenizer:
    """One stream's decoder. Joined, what it returns equals the tokenizer's decoding of all ids at once."""

    __slots__ = ("_bytes_of", "_pending", "_texts")

    def __init__(self, table: DecodeTable) -> None:
        self._texts = table.texts
        self._bytes_of = table.bytes_of
        self._pending = b""  # an incomplete character

    def push(self, ids: Sequence[int]) -> str:
        """Text that became final with ``ids``. Raises IndexError for an id outside the vocabulary."""
        if not self._pending:
            try:
                return "".join(map(self._texts.__getitem__, ids))  # type: ignore[arg-type]
            except TypeError:  # a None among them: part of a character
                pass
        return "".join(self._pieces(ids))

    def _pieces(self, ids: Iterable[int]) -> list[str]:
        texts, bytes_of, pending = self._texts, self._bytes_of, self._pending
        pieces = []
        for index in ids:
            text = texts[index]
            if text is None or pending:
                data = pending + bytes_of[index]
                text, used = codecs.utf_8_decode(data, "replace", False)
                pending = data[used:]
            pieces.append(text)
        self._pending = pending
        return pieces

    def flush(self) -> str:
        """Text of an incomplete character, now that no more tokens come."""
        pending, self._pending = self._pending, b""
        return pending.decode(errors="replace")

    def copy(self) -> Detokenizer:
        """A decoder in the same state."""
        twin = object.__new__(Detokenizer)
        twin._texts, twin._bytes_of, twin._pending = self._texts, self._bytes_of, self._pending
        return twin


def _decoder_kinds(decoder: dict[str, object] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        inner = decoder["decoders"]
        assert isinstance(inner, list)
        return [kind for part in inner for kind in _decoder_kinds(part)]
    return [str(decoder["type"])]


def _token_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    """A token with any character outside the byte alphabet stands for itself."""
    try:
        return bytes(byte_of[char] for char in token)
    except KeyError:
        return token.encode()


def _whole_text(data: bytes) -> str | None:
    """The text of ``data``, None when a byte of it belongs to a character that lies partly outside."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
