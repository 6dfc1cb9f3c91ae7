"""Tokenizing at some forty times the reference's speed, where a check at the start shows that the ids are the same."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice

import numpy as np
from tokenizers import Tokenizer

from services.common.logging import get_logger

# The library's own pool has a thread for each core of the node, whatever this process may use.
os.environ.setdefault("RAYON_NUM_THREADS", "1")

Encode = Callable[[str], list[int]]

LARGE_TEXT_CHARS = 8_192  # from here on the interpreter lock is let go, which costs a small text more than it takes
CHECKS = 4_000
SEED = 20_260_729
PIECES = (
    *("the quick brown fox", " jumps", "Over", "THE", "don't", "we'LL", "'s", "'S", "'\u017f", "it's", " 'quoted'"),
    *("größer", "naïve", "l'été", "Ελληνικά", "русский", "العربية", "עברית", "हिन्दी", "ไทย", "ﬁ"),
    *("日本語", "中文", "한국어", "🦊", "👩\u200d👩\u200d👧", "🏳️\u200d🌈", "e\u0301", "\u200b", "\u00ad", "\ufeff"),
    *("0", "12", "1234567890", "3.14", "1e-5", "٣٤٥", "½", "Ⅷ", "²", "0x1F", "10,000", "\u2028", "\u0085"),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t", "\u00a0", "\u3000", "\v", "\f", " \n ", "\n  "),
    *("def f(x):\n    return x**2", '{"a": [1, null]}', "<div class='x'>", "/* c */", "a_b-c.d/e", "!!!", "...", "—"),
    *("https://example.com/?q=1&r=%20", "user@example.com", "#tag", "$9.99", "~`@^&*()_+=|\\<>?;:", "“”"),
)


def reference(tokenizer: Tokenizer) -> Encode:
    """The reference's ids, no special tokens added."""

    def encode(text: str) -> list[int]:
        # The batch call releases the interpreter lock while it works, the single one does not.
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    return encode


@lru_cache(maxsize=4)
def choose(tokenizer_json: bytes, unencodable: bytes) -> Encode:
    """The fastest encoder whose ids equal the reference's. Takes a few tenths of a second: call it off the event loop.

    ``unencodable`` are bytes that no token expresses: prompts with them are refused, so they are not compared.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    log = get_logger()
    try:
        fast = _splintr(tokenizer_json)
        difference = first_difference(fast, tokenizer, unencodable)
    except Exception as error:  # no wheel for this machine, or a tokenizer of a kind that the library does not read
        difference = f"{type(error).__name__}: {error}"
    if difference is not None:
        log.warning("tokenizer_is_the_reference", slower_by=40, why_not_splintr=difference)
        return reference(tokenizer)
    log.info("tokenizer_is_fast", library="splintr", compared=CHECKS)
    return fast


def first_difference(fast: Encode, tokenizer: Tokenizer, unencodable: bytes) -> str | None:
    """Where ``fast`` and the reference part on the check's texts; None when they do not."""
    forbidden = frozenset(unencodable)
    texts = [text for text in islice(check_texts(tokenizer), CHECKS) if forbidden.isdisjoint(text.encode())]
    texts += [text * (LARGE_TEXT_CHARS // len(text) + 1) for text in ("a", " ", "ab ", "\n", "1")]
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for text, encoding in zip(texts, encodings, strict=True):
        if fast(text) != encoding.ids:
            return f"its ids differ for {text[:80]!r}"
    return None


def check_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Without end, and the same every time: ordinary text, pieces of it thrown together, and plain noise."""
    rng = random.Random(SEED)  # noqa: S311 - not for secrets
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    yield from (piece for piece in (*PIECES, *added))
    pieces = (*PIECES, *added)
    while True:
        yield "".join(rng.choices(pieces, k=rng.randint(2, 12)))
        yield " ".join(rng.choices(pieces, k=rng.randint(2, 8)))
        yield _characters(rng, 0x20, 0x7E)
        yield _characters(rng, 0x00, 0x24F)
        yield _characters(rng, 0x00, 0xFFFF)
        yield _characters(rng, 0x00, 0x10FFFF)
        yield "".join(rng.choices(" \t\n\r\v\f\u0085\u00a0\u2003\u3000a1.'s", k=rng.randint(1, 24)))


def _characters(rng: random.Random, low: int, high: int) -> str:
    codes = (rng.randint(low, high) for _ in range(rng.randint(1, 32)))
    return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


def _splintr(tokenizer_json: bytes) -> Encode:
    """Raises ImportError where there is no wheel, ValueError for what the library does not read."""
    import splintr  # noqa: PLC0415 - an optional part of the machine

    content = json.loads(tokenizer_json)
    content["post_processor"] = None  # adds special tokens, which no prompt of ours wants
    tokenizer = splintr.from_json_bytes(json.dumps(content).encode())

    def encode(text: str) -> list[int]:
        if len(text) < LARGE_TEXT_CHARS:
            return tokenizer.encode_raw(text)
        ids, _ = tokenizer.encode_batch_flat([text])
        flat: list[int] = np.frombuffer(ids, "<u4").tolist()
        return flat

    return encode
