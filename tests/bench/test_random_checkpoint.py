"""Checkpoints of random weights: readable as any other, noise of the right size, a text for every id."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from bench.random_checkpoint import CHAT_TEMPLATE, SPECIAL, folder_bytes, tokenizer, write_checkpoint
from services.dpu_gateway.chat import ChatTemplate
from services.dpu_gateway.detokenizer import DecodeTable
from services.dpu_gateway.fast_tokenizer import choose, reference
from services.gpu_engine.cuda.bfloat16 import rows_as_bfloat16
from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.loader import open_checkpoint
from tests.gpu_engine.models.tiny import tiny_config

VOCABULARY = 3000


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(vocabulary=VOCABULARY, hidden=256, ffn=96),
        tiny_config(vocabulary=VOCABULARY, architecture="phi3"),
    ],
    ids=["llama", "fused tensors"],
)
def test_the_folder_opens_as_the_model_and_its_matrices_keep_activations_in_size(
    tmp_path: Path, config: ModelConfig
) -> None:
    write_checkpoint(tmp_path, config, shards=3)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == config
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert checkpoint.stored_bytes() == folder_bytes(config)
    for spec, tensor in checkpoint.tensors():
        bits = rows_as_bfloat16(tensor, 0, tensor.data.shape[0]).astype(np.uint32) << 16
        values = bits.view(np.float32)
        if len(spec.shape) == 1:
            assert (values == 1).all()
        else:
            assert values.std() == pytest.approx(spec.shape[1] ** -0.5, rel=0.1)
            assert abs(values.mean()) < values.std() / 10


def test_no_two_tensors_hold_the_same_values(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(vocabulary=VOCABULARY))
    starts = [bytes(tensor.data[0, :64]) for spec, tensor in open_checkpoint(tmp_path).tensors() if len(spec.shape) > 1]
    assert len(set(starts)) == len(starts)


def test_every_id_has_a_text_and_the_fast_tokenizer_reads_it() -> None:
    content = json.dumps(tokenizer(VOCABULARY)).encode()
    loaded = Tokenizer.from_str(content.decode())
    assert loaded.get_vocab_size() == VOCABULARY
    assert len(DecodeTable(loaded).texts) == VOCABULARY
    words = [loaded.decode([index]) for index in range(len(SPECIAL) + 256, VOCABULARY)]
    assert all(word.strip().isalpha() for word in words)
    assert len(set(words)) == len(words)
    assert loaded.decode(loaded.encode("The answer, größer: 42\n").ids) == "The answer, größer: 42\n"
    text = "a quick look at the words " * 3
    encode = choose(content, b"")
    assert encode(text) == reference(loaded)(text)
    assert "_splintr" in encode.__qualname__


def test_a_chat_renders() -> None:
    chat = ChatTemplate(CHAT_TEMPLATE, *SPECIAL).render([{"role": "user", "content": "hello"}])
    assert chat == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"


def test_a_vocabulary_below_the_bytes_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"vocabulary is 200.* at least 258 ids"):
        tokenizer(200)
