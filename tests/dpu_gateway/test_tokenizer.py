from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator

import psutil
import pytest

from services.dpu_gateway.chat import ChatTemplate
from services.dpu_gateway.errors import FieldError
from services.dpu_gateway.fast_tokenizer import reference
from services.dpu_gateway.tokenizer import SHORT_CHAT_MESSAGES, SHORT_PROMPT_CHARS, EncodePools, PromptEncoder
from tests.dpu_gateway.small_tokenizer import CORPUS, byte_level_tokenizer
from tests.dpu_gateway.test_chat import CHATML


@pytest.fixture
def pools() -> Iterator[EncodePools]:
    pools = EncodePools(threads=1)
    yield pools
    pools.shutdown()


def encoder(pools: EncodePools, unencodable: bytes = b"", max_tokens: int = 10_000_000) -> PromptEncoder:
    tokenizer = byte_level_tokenizer(missing_bytes=tuple(unencodable))
    return PromptEncoder(
        tokenizer,
        reference(tokenizer),
        ChatTemplate(CHATML, "", ""),
        unencodable=unencodable,
        max_tokens=max_tokens,
        pools=pools,
    )


async def test_text_is_tokenized_as_it_stands(pools: EncodePools) -> None:
    tokenizer = byte_level_tokenizer()
    for text in CORPUS:
        assert await encoder(pools).encode_text(text) == tokenizer.encode(text, add_special_tokens=False).ids


async def test_chat_is_rendered_and_its_markers_become_special_tokens(pools: EncodePools) -> None:
    ids = await encoder(pools).encode_chat([{"role": "user", "content": "hi"}])
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == tokenizer.token_to_id("<|im_start|>")


async def test_bytes_that_the_vocabulary_lacks_are_refused_with_byte_and_place(pools: EncodePools) -> None:
    lacking = b"\x04\x13\xf3"
    with pytest.raises(FieldError, match="text has byte 0x13 at character 3, which the model's vocabulary"):
        await encoder(pools, lacking).encode_text("é a\x13\x04")
    with pytest.raises(FieldError, match="byte 0xF3 at character 1"):
        await encoder(pools, lacking).encode_text("a\U000e0001")
    with pytest.raises(FieldError, match=r"chat\.messages\[0\]\.content has byte 0x04"):
        await encoder(pools, lacking).encode_chat([{"role": "user", "content": "\x04"}])
    assert await encoder(pools).encode_text("\x13\x04")  # a full vocabulary takes them


async def test_a_lone_surrogate_is_refused(pools: EncodePools) -> None:
    with pytest.raises(FieldError, match=r"lone surrogate U\+D83D at character 2"):
        await encoder(pools).encode_text("ab\ud83d")


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(pools: EncodePools) -> None:
    with pytest.raises(FieldError, match="has 1000000 characters, which is more than 100 tokens"):
        await encoder(pools, max_tokens=100).encode_text("x" * 1_000_000)


async def test_a_megabyte_prompt_stalls_neither_the_event_loop_nor_a_short_prompt(pools: EncodePools) -> None:
    text = "".join(CORPUS) * 3000
    assert len(text) > 800_000
    target, ordinary = encoder(pools), "short " * SHORT_PROMPT_CHARS
    large = asyncio.create_task(target.encode_text(text))
    short = 0
    while not large.done():
        assert await target.encode_text(ordinary) != []
        short += 1
    assert short >= 5  # each of them came back while the large one was at work
    assert len(await large) > 100_000


def test_short_prompts_are_tokenized_at_once_and_longer_ones_by_a_thread(pools: EncodePools) -> None:
    """What suspends its coroutine can't be run without an event loop."""
    target = encoder(pools)

    def at_once(encoding: Coroutine[None, None, list[int]]) -> bool:
        try:
            encoding.send(None)
        except StopIteration as ended:
            return bool(ended.value)
        except RuntimeError:  # no running event loop
            return False
        raise AssertionError

    assert at_once(target.encode_text("x" * SHORT_PROMPT_CHARS))
    assert not at_once(target.encode_text("x" * (SHORT_PROMPT_CHARS + 1)))
    turn = {"role": "user", "content": "hi"}
    assert at_once(target.encode_chat([turn]))
    assert not at_once(target.encode_chat([turn] * (SHORT_CHAT_MESSAGES + 1)))
    assert not at_once(target.encode_chat([{"role": "user", "content": "x" * (SHORT_PROMPT_CHARS + 1)}]))


async def test_the_tokenizer_starts_no_threads_of_its_own(pools: EncodePools) -> None:
    target = encoder(pools)
    await target.encode_text("warm " * SHORT_PROMPT_CHARS)
    before = psutil.Process().num_threads()
    await target.encode_text("a text of several words " * 1000)
    assert psutil.Process().num_threads() <= before
