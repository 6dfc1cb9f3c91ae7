"""Tokenizing speed: the reference against what a gateway chooses at its start, on one core, texts all different.

    python -m bench.tokenizer [--model smollm2-135m-instruct]

Each text is random words of the model's own vocabulary, so that no cache of whole texts can help. Ids are compared
before anything is timed. The last columns are what a request pays: the encoder's thread included.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from services.bootstrap.store import ModelStore
from services.dpu_gateway.chat import ChatTemplate
from services.dpu_gateway.fast_tokenizer import choose, reference
from services.dpu_gateway.tokenizer import EncodePools, PromptEncoder
from services.gpu_engine.models.loader import open_checkpoint

LENGTHS = (10, 100, 1000, 2048)
TOKENS = 100_000  # in each row


def median_us(encode: Callable[[str], object], texts: list[str]) -> float:
    times = []
    for text in texts:
        begun = time.perf_counter()
        encode(text)
        times.append(time.perf_counter() - begun)
    return float(np.median(times)) * 1e6


async def median_request_us(encoder: PromptEncoder, texts: list[str]) -> float:
    times = []
    for text in texts:
        begun = time.perf_counter()
        await encoder.encode_text(text)
        times.append(time.perf_counter() - begun)
    return float(np.median(times)) * 1e6


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    files = open_checkpoint(ModelStore().resolve(parser.parse_args().model)).tokenizer
    tokenizer = Tokenizer.from_buffer(files.json)
    begun = time.perf_counter()
    fast = choose(files.json, files.unencodable_bytes)
    print(f"chosen in {time.perf_counter() - begun:.2f} s")
    slow = reference(tokenizer)
    words = [word[1:] for word in tokenizer.get_vocab() if word[0] == "Ġ" and word[1:].isascii() and word[1:].isalpha()]
    rng = random.Random(0)
    table = Table("words", "tokens", "reference µs", "chosen µs", "ratio", "a request, reference µs", "chosen µs")
    pools = EncodePools(1)
    encoders = [
        PromptEncoder(
            tokenizer,
            encode,
            ChatTemplate("", "", ""),
            unencodable=files.unencodable_bytes,
            max_tokens=8191,
            pools=pools,
        )
        for encode in (slow, fast)
    ]
    for length in LENGTHS:
        texts = [" ".join(rng.choices(words, k=length)) for _ in range(TOKENS // length // 2)]
        assert all(fast(text) == slow(text) for text in texts)
        fresh = [" ".join(rng.choices(words, k=length)) for _ in range(TOKENS // length // 2)]
        before, after = median_us(slow, fresh), median_us(fast, fresh)
        requests = [f"{await median_request_us(encoder, fresh):.0f}" for encoder in encoders]
        tokens = float(np.mean([len(fast(text)) for text in fresh]))
        table.add_row(str(length), f"{tokens:.0f}", f"{before:.1f}", f"{after:.1f}", f"{before / after:.1f}", *requests)
    pools.shutdown()
    Console(width=110).print(table)


if __name__ == "__main__":
    uvloop.run(main())
