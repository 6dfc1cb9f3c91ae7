"""Salts reach the engine as numbers that differ where models or salts do."""

from __future__ import annotations

from services.dpu_gateway.cache_salt import salt_words

MODEL, OTHER = "ab" * 32, "cd" * 32


def test_model_and_salt_make_the_words() -> None:
    assert salt_words(MODEL, "mine") == salt_words(MODEL, "mine")
    words = [salt_words(model, salt) for model in (MODEL, OTHER) for salt in ("", "mine", "theirs", "/", "mine/")]
    assert len(set(words)) == len(words)
    assert all(0 <= word < 1 << 64 for pair in words for word in pair)
