"""Turns prompts into token ids; off the event loop, unless that takes longer than the tokenizing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tokenizers import Tokenizer

from services.dpu_gateway.chat import ChatTemplate
from services.dpu_gateway.errors import FieldError
from services.dpu_gateway.fast_tokenizer import Encode

# The library's own pool has a thread for each core of the node, whatever this process may use.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

LARGE_PROMPT_CHARS = 32_768

# So little is done at once: 7 µs by the fast tokenizer, a quarter of a millisecond by the reference. A thread takes 0.1
# to 0.3 ms there and back, and while the event loop is busy waits for the interpreter lock twice.
SHORT_PROMPT_CHARS = 1_024
SHORT_CHAT_MESSAGES = 8


class EncodePools:
    """Threads that render and tokenize: ``threads`` for ordinary prompts and one for large ones.

    Large prompts wait for each other, so none of them makes a short prompt wait.
    """

    def __init__(self, threads: int) -> None:
        self._ordinary = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="encode-large")

    @property
    def background(self) -> ThreadPoolExecutor:
        """For other long work that must not stall the event loop."""
        return self._large

    def of(self, chars: int) -> ThreadPoolExecutor:
        return self._large if chars > LARGE_PROMPT_CHARS else self._ordinary

    def shutdown(self) -> None:
        for pool in (self._ordinary, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


class PromptEncoder:
    """Text or chat messages → token ids of one model, by ``encode``, whose ids are those of ``tokenizer``.

    ``unencodable`` are the bytes that the vocabulary has no token for and the tokenizer would silently drop.
    ``max_tokens`` bounds the prompt: a text that cannot fit is refused before it is tokenized where that is certain.
    All failures are FieldError, naming the request's field.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        encode: Encode,
        template: ChatTemplate,
        *,
        unencodable: bytes,
        max_tokens: int,
        pools: EncodePools,
    ) -> None:
        self.template = template
        self._encode_text = encode
        self._max_tokens = max_tokens
        self._pools = pools
        self._missing = unencodable
        longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        # A token covers at most `longest` characters of normalized text, and without a normalizer of the text itself.
        self._max_chars = max_tokens * longest if tokenizer.normalizer is None else None

    async def encode_text(self, text: str) -> list[int]:
        """Ids of ``text`` as it stands."""
        if len(text) <= SHORT_PROMPT_CHARS:
            return self._encode(text, "text")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pools.of(len(text)), self._encode, text, "text")

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of ``messages`` rendered with the model's chat template."""
        self.template.require()
        chars = sum(len(message["content"]) for message in messages)
        if chars <= SHORT_PROMPT_CHARS and len(messages) <= SHORT_CHAT_MESSAGES:
            return self._encode_chat(messages)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pools.of(chars), self._encode_chat, messages)

    def _encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        for index, message in enumerate(messages):  # before a template moves what they hold
            for part, text in message.items():
                self._check_bytes(text, f"chat.messages[{index}].{part}")
        return self._encode(self.template.render(messages), "chat")

    def _encode(self, text: str, field: str) -> list[int]:
        if self._max_chars is not None and len(text) > self._max_chars:
            raise FieldError(
                field, f"has {len(text)} characters, which is more than {self._max_tokens} tokens, the prompt's limit"
            )
        self._check_bytes(text, field)
        ids = self._encode_text(text)
        if not ids:
            raise FieldError(field, "gives no tokens")
        return ids

    def _check_bytes(self, text: str, field: str) -> None:
        """Refuse what the tokenizer would silently drop."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise FieldError(
                field, f"has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
            ) from error
        if not self._missing or len(data.translate(None, self._missing)) == len(data):
            return
        offset = next(offset for offset, byte in enumerate(data) if byte in self._missing)
        char = len(data[:offset].decode(errors="ignore"))
        raise FieldError(
            field, f"has byte 0x{data[offset]:02X} at character {char}, which the model's vocabulary cannot encode"
        )
