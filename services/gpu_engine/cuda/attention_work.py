"""Device memory of the attention work list (kernels/attention_work.cuh)."""

from __future__ import annotations

import ctypes

from services.gpu_engine.cuda.driver import Buffer
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.step_arrays import StepLimits

TILE_ROWS, MIN_SPLIT, MAX_SPLITS = 128, 256, 64  # kTileRows, kMinSplit, kMaxSplits
ITEM_BYTES = 32


WORK_LIST = ("counts", "tiles", "splits", "tickets", "arrivals", "partial_out", "partial_ml")


class CWorkList(ctypes.Structure):
    """``blink::WorkList``."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in WORK_LIST)


class AttentionWork:
    """Holds the work of any step within ``limits``."""

    def __init__(self, geometry: Geometry, limits: StepLimits) -> None:
        config = geometry.config
        context = limits.pages_per_sequence * geometry.page_size
        splits = limits.rows * min(MAX_SPLITS, -(-context // MIN_SPLIT))
        tiles = limits.tokens // (TILE_ROWS // geometry.group) + limits.rows
        self.token_row = Buffer(4 * limits.tokens)  # of the step's tokens; other kernels read it too
        self.counts = Buffer(8)
        self.tiles = Buffer(ITEM_BYTES * tiles)
        self.splits = Buffer(ITEM_BYTES * splits)
        self.tickets = Buffer(2 * 4 * config.layers)
        self.arrivals = Buffer(4 * limits.rows * config.kv_heads)
        self.arrivals.fill(0)
        self.partial_out = Buffer(4 * splits * config.query_width, "partial results of attention")
        self.partial_ml = Buffer(8 * splits * config.heads)

    def as_argument(self) -> CWorkList:
        return CWorkList(*(getattr(self, name).pointer for name in WORK_LIST))
