"""Nanoseconds a token of incremental detokenizing, by batch size, beside Hugging Face's own incremental decoder.

python -m bench.detokenizer
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.dpu_gateway.detokenizer import DecodeTable, Detokenizer
from services.dpu_gateway.output import OutputText
from tests.dpu_gateway.small_tokenizer import CORPUS, byte_level_tokenizer

TOKENS = 50_000
REPEATS = 7
BATCHES = (1, 4, 16, 64)
STOP_STRINGS = ("</answer>", "\n\nUser:")


def best(run: Callable[[], object]) -> float:
    """Nanoseconds a token of the fastest run."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - start)
    return min(times) / TOKENS


def batches(ids: list[int], size: int) -> list[list[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def hugging_face(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = DecodeStream(skip_special_tokens=True)
    for index in ids:
        stream.step(tokenizer, index)


def main() -> None:
    tokenizer = byte_level_tokenizer()
    decode_table = DecodeTable(tokenizer)
    texts = {"English": CORPUS[0], "Chinese, Japanese, Russian, emoji": CORPUS[2]}
    table = Table("text", *(f"batch {size}" for size in BATCHES), "batch 16, stop strings", "HF DecodeStream")
    for name, text in texts.items():
        once = tokenizer.encode(text).ids
        ids = (once * (TOKENS // len(once) + 1))[:TOKENS]
        assert Detokenizer(decode_table).push(ids) == tokenizer.decode(ids).removesuffix("\ufffd")
        row = []
        for size in BATCHES:
            parts = batches(ids, size)
            detokenizer = Detokenizer(decode_table)

            def plain(parts: list[list[int]] = parts, detokenizer: Detokenizer = detokenizer) -> None:
                for part in parts:
                    detokenizer.push(part)

            row.append(best(plain))
        output, parts = OutputText(decode_table, STOP_STRINGS), batches(ids, 16)

        def with_stop_strings(output: OutputText = output, parts: list[list[int]] = parts) -> None:
            for part in parts:
                output.push(part)

        row.append(best(with_stop_strings))
        row.append(best(lambda ids=ids: hugging_face(tokenizer, ids)))  # type: ignore[misc]
        table.add_row(name, *(f"{value:.0f} ns" for value in row))
    Console().print(table)


if __name__ == "__main__":
    main()
