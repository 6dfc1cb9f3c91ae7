"""How the blocks of a skinny product share its weights. None of it changes a result: every sum runs over k in order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

WIDTHS = (8, 16, 32, 64)
"""Tokens that a build of the kernels holds."""
DEPTH = 64
ROW_BYTES = 2 * DEPTH  # of a stage
TILE_ROWS = range(16, 129, 16)
GROUP_ROWS = 64
MOST_STAGES = 60
BARRIER_BYTES = 1024
MOST_SHARED_BYTES = 224 << 10  # of 227 KiB, whose first may be taken up by the alignment of the ring
SLICE_ROWS = 8  # least of X that one block of a cluster copies for all: an atom of the swizzle

# What an H200 moves in a nanosecond, in bytes, and how long a copy takes: they weigh one schedule against another.
MEMORY_RATE, L2_RATE, MULTIPROCESSOR_RATE = 4400, 5500, 100
LATENCY_NS = 1300
WHOLE_RING, HALF_RING = 216 << 10, 104 << 10  # one block a multiprocessor, or a second one: the successor's
HELD_STAGES = 2  # by the products in flight
PREFETCHED_BYTES = 16 << 20  # a third of an H200's L2: read while attention over few rows leaves the memory idle
AT_ONCE = 1 << 20  # more stages than any block has


@dataclass(frozen=True)
class Schedule:
    """The shape of a launch.

    Attributes:
        rows: of the weight in a tile, one of TILE_ROWS.
        run: successive tiles of a block.
        cluster: blocks that share the copies of X, 1 or a power of 2 up to ``width / 8``.
        ring: bytes of weights and activations that a block has in flight.
        prefetched: stages that a block brings into L2 beyond its ring before its predecessor has ended.
        early: stages still to be asked for when the successor may begin.
    """

    rows: int
    run: int
    cluster: int = 1
    ring: int = WHOLE_RING
    prefetched: int = 0
    early: int = AT_ONCE

    def blocks(self, weight_rows: int) -> int:
        return _up(_up(weight_rows, self.rows) // self.rows, self.run * self.cluster) // self.run

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
        behind = (_up(self.rows, GROUP_ROWS) - self.rows) * ROW_BYTES
        return BARRIER_BYTES + self.stages(width) * self.stage_bytes(width) + behind


@cache
def schedule_of(weight_rows: int, width: int, multiprocessors: int) -> Schedule:
    """The schedule that should take the least time, by what it moves through the memory, the L2 and one multiprocessor.

    Args:
        width: one of WIDTHS.
        multiprocessors: at most so many blocks.
    """

    chosen = min(
        _candidates(weight_rows, width, multiprocessors),
        key=lambda schedule: (_time(schedule, weight_rows, width), schedule.cluster, schedule.ring, schedule.run),
    )
    stage_bytes = chosen.blocks(weight_rows) * chosen.rows * ROW_BYTES  # of the weights, all blocks'
    return replace(chosen, prefetched=PREFETCHED_BYTES // stage_bytes)


def _time(schedule: Schedule, weight_rows: int, width: int) -> float:
    """Nanoseconds for two bytes of each row."""
    on_the_way = (schedule.stages(width) - HELD_STAGES) * schedule.stage_bytes(width)
    through_one = schedule.run * (schedule.rows + width)
    through_l2 = schedule.blocks(weight_rows) * schedule.run * (schedule.rows + width / schedule.cluster)
    return 2 * max(
        weight_rows / MEMORY_RATE,
        through_l2 / L2_RATE,
        through_one / min(MULTIPROCESSOR_RATE, on_the_way / LATENCY_NS),
    )


def _candidates(weight_rows: int, width: int, multiprocessors: int) -> list[Schedule]:
    clusters = [1, 2] if width >= 2 * SLICE_ROWS and multiprocessors > 1 else [1]
    return [
        Schedule(rows, _up(weight_rows, rows * blocks) // (rows * blocks), cluster, ring)
        for rows, cluster, ring in product(TILE_ROWS, clusters, (HALF_RING, WHOLE_RING))
        for blocks in [multiprocessors // cluster * cluster]
    ]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
