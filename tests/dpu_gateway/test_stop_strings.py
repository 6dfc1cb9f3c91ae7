from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.dpu_gateway.stop_strings import StopStrings

WORDS = st.text(alphabet="ab", min_size=1, max_size=5)


def slow_answer(strings: list[str], text: str) -> tuple[str, str | None]:
    """Looks at every prefix: the first that ends with a stop string ends generation; the longest such string wins."""
    for end in range(1, len(text) + 1):
        matches = [string for string in strings if text[:end].endswith(string)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def slow_hold_back(strings: list[str], text: str) -> str:
    suffixes = (text[start:] for start in range(len(text)))
    return next((suffix for suffix in suffixes if any(string.startswith(suffix) for string in strings)), "")


@given(st.lists(WORDS, min_size=1, max_size=4), st.lists(st.text(alphabet="abc", max_size=6), max_size=12))
def test_the_result_does_not_depend_on_where_the_text_was_cut(strings: list[str], pieces: list[str]) -> None:
    scanner = StopStrings(strings)
    sent, matched = "", None
    for piece in pieces:
        scan = scanner.push(piece)
        sent += scan.text
        if scan.matched is not None:
            matched = scan.matched
            break
    if matched is None:
        sent += scanner.flush()
    assert (sent, matched) == slow_answer(strings, "".join(pieces))


@given(st.lists(WORDS, min_size=1, max_size=4), st.lists(st.text(alphabet="abc", max_size=6), max_size=12))
def test_exactly_what_may_still_become_a_stop_string_is_held_back(strings: list[str], pieces: list[str]) -> None:
    scanner = StopStrings(strings)
    seen = ""
    for piece in pieces:
        seen += piece
        if scanner.push(piece).matched is not None:
            return
        assert scanner.held == slow_hold_back(strings, seen)


def test_without_stop_strings_nothing_is_held_back() -> None:
    scanner = StopStrings(())
    assert not scanner
    assert scanner.push("abc").text == "abc"
    assert scanner.held == ""


def test_a_long_output_leaves_no_state_behind() -> None:
    scanner = StopStrings(["</s>", "\n\n"])
    for _ in range(10_000):
        scanner.push("no end in sight < ")
        assert len(scanner.held) <= 3
