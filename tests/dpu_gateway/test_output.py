from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.dpu_gateway.detokenizer import DecodeTable
from services.dpu_gateway.output import OutputText
from tests.dpu_gateway.small_tokenizer import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
TABLE = DecodeTable(TOKENIZER)
TEXTS = st.text(alphabet="abc é🦊", max_size=30)
SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=40)


def run(ids: list[int], sizes: list[int], strings: list[str]) -> tuple[str, int, str | None]:
    """Text, tokens used and the stop string, with the ids in batches of these sizes, again and again."""
    output = OutputText(TABLE, strings)
    text, used, start = "", 0, 0
    for size in sizes * (len(ids) + 1):
        piece = output.push(ids[start : start + size])
        start += size
        text += piece.text
        used += piece.used
        if piece.matched is not None:
            return text, used, piece.matched
        if start >= len(ids):
            break
    else:
        return run(ids, [1], strings)  # all sizes were 0
    last = output.flush()
    return text + last.text, used, last.matched


@given(TEXTS, SIZES, st.lists(st.text(alphabet="abc é", min_size=1, max_size=4), max_size=3))
def test_text_token_count_and_stop_string_do_not_depend_on_the_batches(
    text: str, sizes: list[int], strings: list[str]
) -> None:
    ids = TOKENIZER.encode(text).ids
    result = run(ids, sizes, strings)
    assert result == run(ids, [1], strings)
    if result[2] is None:
        assert result[:2] == (text, len(ids))
    else:
        assert result[2] in strings
        assert text.startswith(result[0] + result[2])


def test_the_token_that_completes_the_stop_string_is_the_last_one_used() -> None:
    ids = [TOKENIZER.encode(char).ids[0] for char in "ab-stop-c"]
    piece = OutputText(TABLE, ["stop"]).push(ids)
    assert (piece.text, piece.used, piece.matched) == ("ab-", len("ab-stop"), "stop")
