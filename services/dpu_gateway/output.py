"""One stream's text: detokenized, searched for stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.dpu_gateway.detokenizer import DecodeTable, Detokenizer
from services.dpu_gateway.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class Piece:
    """``text`` is final. When a stop string ``matched``, the first ``used`` ids completed it and the rest is void."""

    text: str
    used: int
    matched: str | None = None


class OutputText:
    """Joined, the pieces are the same however the ids were cut into batches."""

    __slots__ = ("_detokenizer", "_stops")

    def __init__(self, table: DecodeTable, stop_strings: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(table)
        self._stops = StopStrings(stop_strings)

    def push(self, ids: Sequence[int]) -> Piece:
        """Text that became final with ``ids``. After a match nothing more may be pushed."""
        if not self._stops:
            return Piece(self._detokenizer.push(ids), len(ids))
        detokenizer, stops = self._detokenizer.copy(), self._stops.copy()
        scan = self._stops.push(self._detokenizer.push(ids))
        if scan.matched is None:
            return Piece(scan.text, len(ids))
        # Only now it matters which token it was: replay them one by one.
        used = next(count for count, index in enumerate(ids, 1) if stops.push(detokenizer.push((index,))).matched)
        return Piece(scan.text, used, scan.matched)

    def flush(self) -> Piece:
        """What was held back, now that no more tokens come."""
        scan = self._stops.push(self._detokenizer.flush())
        if scan.matched is not None:
            return Piece(scan.text, 0, scan.matched)
        return Piece(scan.text + self._stops.flush(), 0)
