"""How the blocks of the fused decode step share a product's weights (kernels/weight_stream.cuh, ``Product``).

None of it changes a result: every sum runs over k in order.
"""

from __future__ import annotations

import ctypes
from dataclasses import astuple, dataclass

from services.gpu_engine.cuda.skinny_schedule import DEPTH, ratio_up
from services.gpu_engine.models.config import ModelConfig

GROUP = 16  # rows of a warp: tiles are multiples
MOST_GROUPS = 8  # of a tile: two warpgroups
STAGE_ROWS = 128  # times boxes, at most: kSlotWeightBytes
BOXES = (4, 2, 1)  # of a stage, each DEPTH columns


class CProduct(ctypes.Structure):
    """``blink::Product``."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("outputs", "rows", "tiles", "run", "boxes", "stages"))


@dataclass(frozen=True)
class ProductPlan:
    """A product's tiles.

    Attributes:
        outputs: columns of the result.
        rows: of the weight in a tile.
        tiles: in all.
        run: successive tiles of a block.
        boxes: of a stage.
        stages: of a tile.
    """

    outputs: int
    rows: int
    tiles: int
    run: int
    boxes: int
    stages: int

    @classmethod
    def of(cls, weight_rows: int, depth: int, blocks: int, *, outputs: int) -> ProductPlan:
        """As few rows as possible for the block with the most of ``blocks``; then stages as long as fit a slot."""
        groups = ratio_up(ratio_up(weight_rows, GROUP), blocks)  # that a block has at least
        least = ratio_up(groups, MOST_GROUPS)
        run = min(range(least, least + MOST_GROUPS), key=lambda run: run * ratio_up(groups, run))
        rows = GROUP * ratio_up(groups, run)
        chunks = depth // DEPTH
        boxes = next(count for count in BOXES if chunks % count == 0 and count * rows <= STAGE_ROWS)
        return cls(outputs, rows, ratio_up(weight_rows, rows), run, boxes, chunks // boxes)

    def as_argument(self) -> CProduct:
        return CProduct(*astuple(self))


def product_plans(config: ModelConfig, blocks: int) -> tuple[ProductPlan, ...]:
    """Of QKV, output, gate-up, down and head: ``Part`` of kernels/fused_decode.cuh."""
    hidden, query, ffn, fused = config.hidden, config.query_width, config.ffn, config.query_width + 2 * config.kv_width
    shapes = (
        (fused, hidden, fused),
        (hidden, query, hidden),
        (2 * ffn, hidden, ffn),
        (hidden, ffn, hidden),
        (config.vocabulary, hidden, config.vocabulary),
    )
    return tuple(ProductPlan.of(rows, depth, blocks, outputs=outputs) for rows, depth, outputs in shapes)
