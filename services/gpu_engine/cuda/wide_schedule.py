"""How the blocks of a wide product share its tiles. None of it changes a result: every sum runs over k in order."""

from __future__ import annotations

from dataclasses import dataclass

from services.gpu_engine.cuda.skinny_schedule import ratio_up

DEPTH = 64  # columns of a stage
CLUSTER = 2  # blocks
SHARED_BYTES = 224 << 10  # of 227 KiB, whose first may be taken up by the alignment
MOST_LIKELY = 3

# Of a multiprocessor and a clock: what bounds a tile, to guess which tiles are worth measuring.
_MULTIPLIED = 2048  # products of two numbers
_TAKEN_BYTES = 64  # into shared memory
_L2_BYTES = 28  # its share of what the L2 cache delivers


@dataclass(frozen=True)
class WideTile:
    """What a block computes at a time, and a build of the kernel.

    Attributes:
        tokens: 64 or 128.
        rows: of the weight, gate and up, a multiple of 32.
    """

    tokens: int
    rows: int

    @classmethod
    def parse(cls, text: str) -> WideTile:
        tokens, _, rows = text.partition("x")
        return cls(int(tokens), int(rows))

    def __str__(self) -> str:
        return f"{self.tokens}x{self.rows}"

    @property
    def defines(self) -> dict[str, int]:
        return {"BLINK_WIDE_TOKENS": self.tokens, "BLINK_WIDE_ROWS": self.rows}


TILES = tuple(
    WideTile(tokens, rows)
    for tokens, all_rows in ((128, (128, 160, 192, 224, 256)), (64, (128, 192, 256)))
    for rows in all_rows
)
"""All builds: those that are likely for some number of tokens of the gate-up of small models or of large ones."""


@dataclass(frozen=True)
class WidePlan:
    """A launch of a tile's kernel: clusters of two blocks walk over pairs of neighbouring tiles.

    Attributes:
        token_pairs: pairs of tiles along the tokens.
        row_pairs: along the rows of the weight.
        same_rows: a pair lies along the tokens, so its tiles share rows of the weight; else they share tokens.
    """

    tile: WideTile
    token_pairs: int
    row_pairs: int
    same_rows: bool

    @classmethod
    def of(cls, tile: WideTile, tokens: int, weight_rows: int) -> WidePlan:
        """Pairs along the tokens, unless one would be left over."""
        token_tiles, row_tiles = ratio_up(tokens, tile.tokens), ratio_up(weight_rows, tile.rows)
        if token_tiles % CLUSTER == 0:
            return cls(tile, token_tiles // CLUSTER, row_tiles, same_rows=True)
        return cls(tile, token_tiles, ratio_up(row_tiles, CLUSTER), same_rows=False)

    @property
    def pairs(self) -> int:
        return self.token_pairs * self.row_pairs

    def clusters(self, multiprocessors: int) -> int:
        return min(self.pairs, multiprocessors // CLUSTER)

    def clocks(self, multiprocessors: int) -> float:
        """A guess at the clocks that 16 columns take, the weights' way from memory aside."""
        tokens, rows = self.tile.tokens, self.tile.rows
        shared, own = (rows, tokens) if self.same_rows else (tokens, rows)
        column_bytes = 32
        clocks = max(
            16 * tokens * rows / _MULTIPLIED,
            column_bytes * (tokens + rows) / _TAKEN_BYTES,
            column_bytes * (own + shared / CLUSTER) / _L2_BYTES,
        )
        return ratio_up(self.pairs, self.clusters(multiprocessors)) * clocks


def likely_tiles(tokens: int, weight_rows: int, multiprocessors: int) -> list[WideTile]:
    """Worth measuring, the likeliest first.

    Args:
        multiprocessors: at most so many blocks.
    """

    def clocks(tile: WideTile) -> float:
        return WidePlan.of(tile, tokens, weight_rows).clocks(multiprocessors)

    return sorted(TILES, key=clocks)[:MOST_LIKELY]
