from __future__ import annotations

import builtins
import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from services.dpu_gateway import fast_tokenizer
from services.dpu_gateway.fast_tokenizer import (
    LARGE_TEXT_CHARS,
    Encode,
    check_texts,
    choose,
    first_difference,
    reference,
)
from services.gpu_engine.models.checkpoint import Checkpoint
from tests.dpu_gateway.small_tokenizer import byte_level_tokenizer

SMALL = byte_level_tokenizer().to_str().encode()


@pytest.fixture(autouse=True)
def nothing_chosen_before() -> Iterator[None]:
    choose.cache_clear()
    yield
    choose.cache_clear()


def chosen(tokenizer_json: bytes, unencodable: bytes = b"") -> tuple[Encode, str]:
    """The encoder, and the event that says which it is."""
    with capture_logs() as events:
        encode = choose(tokenizer_json, unencodable)
    return encode, str(events[0]["event"])


def test_the_fast_one_is_chosen_and_its_ids_are_the_references_special_tokens_too() -> None:
    encode, event = chosen(SMALL)
    assert event == "tokenizer_is_fast"
    for text in ("<|im_start|>user\nhi<|im_end|>", "[tool]x", "", "größe 🦊", "a" * LARGE_TEXT_CHARS, "hi " * 50_000):
        assert encode(text) == byte_level_tokenizer().encode(text, add_special_tokens=False).ids


def test_special_tokens_that_a_post_processor_would_add_are_not() -> None:
    content = json.loads(SMALL)
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
    }
    encode, event = chosen(json.dumps(content).encode())
    assert event == "tokenizer_is_fast"
    for text in ("hi", "hi " * LARGE_TEXT_CHARS):
        assert encode(text) == byte_level_tokenizer().encode(text).ids


def test_an_encoder_that_differs_in_one_text_of_a_thousand_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference(byte_level_tokenizer())
    rng = random.Random(0)
    monkeypatch.setattr(fast_tokenizer, "_splintr", lambda _: lambda text: right(text)[rng.random() < 0.001 :])
    encode, event = chosen(SMALL)
    assert event == "tokenizer_is_the_reference"
    assert encode("hello world") == right("hello world")


def test_a_machine_without_the_library_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "splintr":
            raise ImportError("no wheel for this machine")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with capture_logs() as events:
        encode = choose(SMALL, b"")
    assert events[0]["event"] == "tokenizer_is_the_reference"
    assert "no wheel for this machine" in events[0]["why_not_splintr"]
    assert encode("hi") == byte_level_tokenizer().encode("hi").ids


def test_what_the_library_cannot_read_falls_back_and_says_why() -> None:
    content = json.loads(SMALL)
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": "bb"}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    encode, _ = chosen(json.dumps(content).encode())  # whichever it is, its ids are right
    assert encode("banana") == tokenizer.encode("banana").ids


def test_the_checks_texts_are_many_different_and_the_same_every_time() -> None:
    tokenizer = byte_level_tokenizer()
    first, second = (list(islice(check_texts(tokenizer), 2000)) for _ in range(2))
    assert first == second
    assert len(set(first)) > 1500
    joined = "".join(first)
    assert all(chr(code) in joined for code in range(128))
    assert {"<|im_start|>", "[tool]"} <= set(first)


@pytest.mark.model
def test_the_served_models_ids_are_the_references(smollm2: Checkpoint) -> None:
    files = smollm2.tokenizer
    tokenizer = Tokenizer.from_buffer(files.json)
    encode, event = chosen(files.json, files.unencodable_bytes)
    assert event == "tokenizer_is_fast"
    forbidden = frozenset(files.unencodable_bytes)

    @settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.text(max_size=200) | st.text("a1 '\n\tsS.\u00a0é", max_size=60))
    def same(text: str) -> None:
        assume(forbidden.isdisjoint(text.encode()))
        assert encode(text) == tokenizer.encode(text, add_special_tokens=False).ids

    same()
    assert first_difference(encode, tokenizer, files.unencodable_bytes) is None
