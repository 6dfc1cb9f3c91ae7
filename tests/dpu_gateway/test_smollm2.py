"""The gateway's text handling on a served model's own tokenizer and template."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer

from services.bootstrap.store import ModelStore
from services.dpu_gateway.chat import ChatTemplate
from services.dpu_gateway.detokenizer import DecodeTable, Detokenizer
from services.dpu_gateway.errors import FieldError
from services.dpu_gateway.fast_tokenizer import choose
from services.dpu_gateway.tokenizer import EncodePools, PromptEncoder
from services.gpu_engine.models.loader import open_checkpoint
from services.gpu_engine.models.tokenizer import TokenizerFiles

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def files() -> TokenizerFiles:
    return open_checkpoint(ModelStore().resolve("smollm2-135m-instruct")).tokenizer


@pytest.fixture(scope="module")
def encoder(files: TokenizerFiles) -> Iterator[PromptEncoder]:
    pools = EncodePools(threads=1)
    template = ChatTemplate(files.chat_template, files.bos_token, files.eos_token)
    yield PromptEncoder(
        Tokenizer.from_buffer(files.json),
        choose(files.json, files.unencodable_bytes),
        template,
        unencodable=files.unencodable_bytes,
        max_tokens=8191,
        pools=pools,
    )
    pools.shutdown()


def test_any_ids_decode_as_hugging_face_decodes_them(files: TokenizerFiles) -> None:
    tokenizer = Tokenizer.from_buffer(files.json)
    table = DecodeTable(tokenizer)
    numbers = np.random.default_rng(5)
    for _ in range(300):
        ids = numbers.integers(0, tokenizer.get_vocab_size(), numbers.integers(1, 60)).tolist()
        detokenizer = Detokenizer(table)
        pieces = [detokenizer.push(part.tolist()) for part in np.array_split(ids, numbers.integers(1, 8))]
        assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


async def test_its_chat_template_gives_its_special_tokens(encoder: PromptEncoder, files: TokenizerFiles) -> None:
    ids = await encoder.encode_chat([{"role": "user", "content": "Why is the sky blue?"}])
    text = Tokenizer.from_buffer(files.json).decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n")
    assert ids[0] == 1


@pytest.mark.parametrize("char", ["\x04", "\x06", "\x13", "\x14", "\x16", "\x1d", "\U00040000"])
async def test_characters_that_its_vocabulary_lacks_are_refused(encoder: PromptEncoder, char: str) -> None:
    with pytest.raises(FieldError, match="at character 2, which the model's vocabulary cannot encode"):
        await encoder.encode_text("ab" + char)
