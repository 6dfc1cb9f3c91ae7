from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from services.dpu_gateway.detokenizer import DecodeTable, Detokenizer, UnsupportedTokenizerError
from tests.dpu_gateway.small_tokenizer import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
TABLE = DecodeTable(TOKENIZER)
IDS = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40)
CUTS = st.lists(st.integers(0, 6), max_size=60)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def token(text: str) -> int:
    index = TOKENIZER.token_to_id(text)
    assert index is not None
    return index


def push_in_pieces(ids: list[int], sizes: list[int]) -> list[str]:
    detokenizer = Detokenizer(TABLE)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
    pieces.append(detokenizer.push(ids[start:]))
    pieces.append(detokenizer.flush())
    return pieces


@given(IDS, CUTS)
def test_any_ids_in_any_pieces_give_the_text_of_decoding_them_all_at_once(ids: list[int], sizes: list[int]) -> None:
    assert "".join(push_in_pieces(ids, sizes)) == TOKENIZER.decode(ids)


@given(TEXTS)
def test_every_text_comes_back_as_it_was(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert "".join(push_in_pieces(ids, [1] * len(ids))) == text


@given(TEXTS)
def test_text_that_is_final_is_never_delayed_and_no_character_is_split(text: str) -> None:
    """After each token exactly the whole characters of the bytes so far have been returned."""
    detokenizer = Detokenizer(TABLE)
    returned, data = "", b""
    for index in TOKENIZER.encode(text, add_special_tokens=False).ids:
        returned += detokenizer.push([index])
        data += TABLE.bytes_of[index]
        assert returned == data.decode(errors="ignore")


def test_special_tokens_have_no_text_and_do_not_break_a_character() -> None:
    euro = [token(char) for char in ("â", "Ĥ", "¬")]  # the three bytes of €
    end = token("<|end|>")
    assert push_in_pieces([euro[0], end, euro[1], end, euro[2]], [1] * 5) == ["", "", "", "", "€", "", ""]


def test_a_character_cut_off_by_the_end_becomes_one_replacement_character() -> None:
    first = token("â")
    assert push_in_pieces([first], [1]) == ["", "", "\ufffd"]


def test_added_tokens_that_are_not_special_keep_their_text() -> None:
    assert push_in_pieces([token("[tool]")], []) == ["[tool]", ""]


def test_a_copy_goes_its_own_way() -> None:
    detokenizer = Detokenizer(TABLE)
    detokenizer.push([token("â")])
    twin = detokenizer.copy()
    assert twin.push([token("a")]) == "\ufffda"
    assert detokenizer.flush() == "\ufffd"


def test_ids_that_only_the_model_knows_have_no_text() -> None:
    table = DecodeTable(TOKENIZER)
    table.extend_to(len(table.texts) + 8)
    assert Detokenizer(table).push([len(table.texts) - 1]) == ""
    with pytest.raises(IndexError):
        Detokenizer(table).push([len(table.texts)])


def test_another_kind_of_decoder_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_tokens([AddedToken("a")])
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(UnsupportedTokenizerError, match="Metaspace"):
        DecodeTable(tokenizer)
    with pytest.raises(UnsupportedTokenizerError, match="None"):
        DecodeTable(Tokenizer(models.BPE()))


@given(IDS)
def test_state_never_grows_with_the_output(ids: list[int]) -> None:
    detokenizer = Detokenizer(TABLE)
    for index in ids:
        detokenizer.push([index])
        assert len(detokenizer._pending) <= 3  # an incomplete character
