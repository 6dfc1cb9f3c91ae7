"""Finds stop strings in a stream of text, whatever the borders between its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """``text`` is final and may be sent; ``matched`` is the stop string that ended generation, if one did."""

    text: str
    matched: str | None = None


class StopStrings:
    """Scans pieces of text; what is returned does not depend on where the pieces were cut.

    The stop string that is complete first wins; of several complete at the same character, the longest. Only the
    longest suffix that could still become a stop string is held back, so the cost of a piece depends on the piece and
    the stop strings, never on what came before.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def __bool__(self) -> bool:
        return bool(self._strings)

    @property
    def held(self) -> str:
        """Text seen that was not returned yet."""
        return self._held

    def push(self, piece: str) -> Scan:
        """Scan the next piece. After a match the scanner must not be used again."""
        text = self._held + piece
        best: tuple[int, int, str] | None = None  # end, start, string: the smallest wins
        for string in self._strings:
            start = text.find(string)
            if start >= 0 and (best is None or (start + len(string), start) < best[:2]):
                best = (start + len(string), start, string)
        if best is not None:
            self._held = ""
            return Scan(text[: best[1]], best[2])
        keep = self._possible_start(text)
        self._held = text[keep:]
        return Scan(text[:keep])

    def copy(self) -> StopStrings:
        """A scanner in the same state."""
        twin = StopStrings(self._strings)
        twin._held = self._held
        return twin

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Where the longest suffix that begins a stop string starts; the text's length if none does."""
        keep = len(text)
        for string in self._strings:
            start = text.find(string[0], max(0, len(text) - len(string) + 1), keep)
            while start >= 0:
                if string.startswith(text[start:]):
                    keep = start
                    break
                start = text.find(string[0], start + 1, keep)
        return keep
