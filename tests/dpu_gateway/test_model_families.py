"""Tokenizers and chat templates built as those of Qwen3, Phi-4 and Phi-3 are: served exactly, or refused by name."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from services.dpu_gateway.chat import ChatTemplate
from services.dpu_gateway.detokenizer import DecodeTable, Detokenizer, UnsupportedTokenizerError
from services.dpu_gateway.fast_tokenizer import reference
from services.dpu_gateway.tokenizer import EncodePools, PromptEncoder
from services.gpu_engine.models.tokenizer import unencodable_bytes
from tests.dpu_gateway.small_tokenizer import CORPUS

# Words, numbers of one digit (Qwen) or up to three (Phi-4), punctuation, blank lines, spaces.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_TEMPLATE = """\
{%- set state = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if state.searching and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set state.searching = false %}
        {%- set state.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and message.tool_calls is not defined %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
PHI_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + "
    "'<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
TEXTS = [*CORPUS, "x = 1234567 + 89\n\n\nreturn x  # 3,141", "cafe\u0301 e\u0301", "\x00\x04\x7f tab\tend  "]


def tiktoken_like(digits: int, special: list[str], plain: list[str], *, compose: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if compose:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT % digits), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return tokenizer


QWEN = tiktoken_like(1, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>", "</think>"], compose=True)
PHI = tiktoken_like(3, ["<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"], [], compose=False)
FAMILIES = {"qwen3": (QWEN, QWEN_TEMPLATE), "phi4": (PHI, PHI_TEMPLATE)}


@pytest.fixture
def pools() -> Iterator[EncodePools]:
    pools = EncodePools(threads=1)
    yield pools
    pools.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
async def test_text_goes_to_tokens_and_back(pools: EncodePools, family: str) -> None:
    tokenizer, template = FAMILIES[family]
    assert unencodable_bytes(tokenizer.to_str().encode()) == b""
    encoder = PromptEncoder(
        tokenizer,
        reference(tokenizer),
        ChatTemplate(template, "", "<|im_end|>"),
        unencodable=b"",
        max_tokens=4096,
        pools=pools,
    )
    table = DecodeTable(tokenizer)
    for text in TEXTS:
        ids = await encoder.encode_text(text)
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
        detokenizer = Detokenizer(table)
        found = "".join(detokenizer.push([index]) for index in ids) + detokenizer.flush()
        assert found == (unicodedata.normalize("NFC", text) if tokenizer.normalizer else text)


async def test_qwen_drops_earlier_thoughts_and_keeps_thinking_visible(pools: EncodePools) -> None:
    encoder = PromptEncoder(
        QWEN,
        reference(QWEN),
        ChatTemplate(QWEN_TEMPLATE, "", "<|im_end|>"),
        unencodable=b"",
        max_tokens=4096,
        pools=pools,
    )
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello"},
        {"role": "user", "content": "again"},
    ]
    ids = await encoder.encode_chat(messages)
    assert QWEN.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )
    think = QWEN.encode("<think></think><|im_end|>", add_special_tokens=False).ids
    assert len(think) == 3
    assert Detokenizer(DecodeTable(QWEN)).push(think) == "<think></think>"  # added, but not special


async def test_phi4_separates_roles_by_a_special_token(pools: EncodePools) -> None:
    encoder = PromptEncoder(
        PHI, reference(PHI), ChatTemplate(PHI_TEMPLATE, "", "<|im_end|>"), unencodable=b"", max_tokens=4096, pools=pools
    )
    ids = await encoder.encode_chat([{"role": "user", "content": "hi"}])
    assert PHI.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user<|im_sep|>hi<|im_end|><|im_start|>assistant<|im_sep|>"
    )
    separator = PHI.encode("<|im_sep|>", add_special_tokens=False).ids
    assert len(separator) == 1
    assert ids.count(separator[0]) == 2


def test_phi3s_sentencepiece_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.BPE({"<unk>": 0, "\u2581a": 1}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    with pytest.raises(UnsupportedTokenizerError, match=r"Replace.*ByteFallback.*only ByteLevel is supported"):
        DecodeTable(tokenizer)
