"""The prefix cache said again: a dictionary from whole prefixes to who has them, no hashes, no pages."""

from __future__ import annotations

from collections.abc import Sequence

Key = tuple[object, ...]  # the salt, then all tokens up to the end of a page


class PrefixModel:
    """``references`` counts for each cached prefix the running sequences that have it; the ``idle`` ones of them have
    none, longest idle first."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.references: dict[Key, int] = {}
        self.idle: dict[Key, None] = {}

    def keys(self, tokens: Sequence[int], salt: object) -> list[Key]:
        """Of the full pages of ``tokens``."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(salt, *tokens[:end]) for end in ends]

    def found(self, keys: list[Key]) -> list[Key]:
        """The first ones of ``keys`` that are cached, up to one that is not."""
        return keys[: next((i for i, key in enumerate(keys) if key not in self.references), len(keys))]

    def reference(self, keys: list[Key]) -> None:
        for key in keys:
            self.references[key] = self.references.get(key, 0) + 1
            self.idle.pop(key, None)

    def release(self, keys: list[Key]) -> None:
        """The longest prefix is idle first."""
        for key in reversed(keys):
            self.references[key] -= 1
            if not self.references[key]:
                self.idle[key] = None

    def reclaim(self, count: int) -> None:
        for key in list(self.idle)[:count]:
            del self.idle[key], self.references[key]
