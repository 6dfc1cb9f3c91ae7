"""How the blocks of a skinny product share its weights. None of it changes a result: every sum runs over k in order."""

from __future__ import annotations

from dataclasses import dataclass

WIDTHS = (8, 16, 32, 64)
"""Tokens that a build of the kernels holds."""
DEPTH = 64
ROW_BYTES = 2 * DEPTH  # of a stage
TILE_ROWS = range(16, 129, 16)
GROUP_ROWS = 64
MOST_STAGES = 60
HELD_STAGES = 2  # by the products in flight
BARRIER_BYTES = 1024
RING_BYTES = 216 << 10  # the deeper, the nearer to the bandwidth; leaves no room for a second product's block
MOST_SHARED_BYTES = 224 << 10  # of 227 KiB, whose first may be taken up by the alignment of the ring
FEW_ROWS = 48  # fewer a tile have not been the best of any product measured (docs/performance.md)


@dataclass(frozen=True)
class Schedule:
    """The shape of a launch.

    Attributes:
        rows: of the weight in a tile, one of TILE_ROWS.
        run: successive tiles of a block.
        ring: bytes of weights and activations that a block has in flight.
    """

    rows: int
    run: int
    ring: int = RING_BYTES

    @classmethod
    def of(cls, rows: int, weight_rows: int, multiprocessors: int) -> Schedule:
        """Tiles of ``rows``, with the shortest run that leaves no more blocks than multiprocessors."""
        return cls(rows, ratio_up(weight_rows, rows * multiprocessors))

    def blocks(self, weight_rows: int) -> int:
        return ratio_up(ratio_up(weight_rows, self.rows), self.run)

    def stage_bytes(self, width: int) -> int:
        return (self.rows + width) * ROW_BYTES

    def stages(self, width: int) -> int:
        """Of the ring. Raises ValueError when there are fewer than products hold at a time."""
        stages = min(MOST_STAGES, self.ring // self.stage_bytes(width))
        if stages < HELD_STAGES:
            raise ValueError(f"{self} has a ring of {stages} stages of {self.stage_bytes(width)} bytes, must be 2")
        return stages

    def shared_bytes(self, width: int) -> int:
        """Barriers, ring, and the room that products of fewer rows than a warpgroup's read behind it."""
        behind = (ratio_up(self.rows, GROUP_ROWS) * GROUP_ROWS - self.rows) * ROW_BYTES
        return BARRIER_BYTES + self.stages(width) * self.stage_bytes(width) + behind


def schedules(weight_rows: int, multiprocessors: int) -> list[Schedule]:
    """Worth measuring: one for each size of tile, the likeliest first, which leaves its blocks the fewest rows.

    Args:
        multiprocessors: at most so many blocks.
    """
    found = [Schedule.of(rows, weight_rows, multiprocessors) for rows in TILE_ROWS]
    return sorted(found, key=lambda schedule: (schedule.rows < FEW_ROWS, schedule.run * schedule.rows, schedule.run))


def ratio_up(value: int, divisor: int) -> int:
    return -(-value // divisor)
