"""Small byte-level BPE tokenizers, trained in a moment, of the same kind as the served models'."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.dpu_gateway.detokenizer import byte_of_char

CORPUS = (
    "The quick brown fox jumps over the lazy dog. Stop here, or go on: nobody knows.\n",
    "Ein schneller brauner Fuchs, größer als üblich, überquert die Straße.\n",
    "敏捷的棕色狐狸跳过了懒狗。こんにちは世界。 Привет, мир! 🦊🐶 👩‍👩‍👧 naïve café\n",
    "def encode(text: str) -> list[int]:\n    return [ord(char) for char in text]\n",
)
SPECIAL_TOKENS = ("<|end|>", "<|im_start|>", "<|im_end|>")


@cache
def byte_level_tokenizer(vocabulary_size: int = 600, missing_bytes: Sequence[int] = ()) -> Tokenizer:
    """A trained tokenizer; ``missing_bytes`` have no token, as in SmolLM2's vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    byte_of = byte_of_char()
    alphabet = [char for char in pre_tokenizers.ByteLevel.alphabet() if byte_of[char] not in missing_bytes]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("[tool]", special=False)])
    return tokenizer
