"""Device memory of the attention work list (kernels/attention_work.cuh)."""

from __future__ import annotations

import ctypes

from services.gpu_engine.cuda.driver import Buffer
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.step_arrays import StepLimits

TILE_ROWS, BLOCK_KEYS, MIN_SPLIT, MAX_SPLITS = 128, 128, 512, 64  # kTileRows, kBlockKeys, kMinSplit, kMaxSplits
ITEM_BYTES = 32
MIN_SEGMENT, MAX_SEGMENTS = 4096, 8
"""Keys of a segment at least, and segments of the longest context at most."""
DIVIDED_TILES = 32
"""Tiles whose segments blocks can share. With more, in 4 KV heads or more, there is work for all blocks anyway."""
MOST_BLOCKS = 144
"""Of a launch: multiprocessors of the largest Hopper GPU."""

BUFFERS = ("counts", "tiles", "splits", "tickets", "arrivals", "partial_out", "partial_ml")
SEGMENT_BUFFERS = ("segment_out", "segment_ml", "segment_arrivals")
SEGMENT_COUNTS = ("segment_blocks", "segments", "slots")


class CWorkList(ctypes.Structure):
    """``blink::WorkList``."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (*BUFFERS, *SEGMENT_BUFFERS)),
        *((name, ctypes.c_uint32) for name in SEGMENT_COUNTS),
    )


class AttentionWork:
    """Holds the work of any step within ``limits``.

    Args:
        segment_keys: in which the keys of a prefill tile are summed, a multiple of 128; results depend on it in their
            last bits. If not given it follows from the longest context.
        divided_tiles: whose segments blocks can share at a time; changes no result.
    """

    def __init__(
        self,
        geometry: Geometry,
        limits: StepLimits,
        *,
        segment_keys: int | None = None,
        divided_tiles: int = DIVIDED_TILES,
    ) -> None:
        config = geometry.config
        context = limits.pages_per_sequence * geometry.page_size
        splits = limits.rows * min(MAX_SPLITS, -(-context // MIN_SPLIT))
        tiles = limits.tokens // (TILE_ROWS // geometry.group) + limits.rows
        least = max(MIN_SEGMENT, -(-context // MAX_SEGMENTS))
        self.segment_blocks = (segment_keys or -(-least // BLOCK_KEYS) * BLOCK_KEYS) // BLOCK_KEYS
        self.segments = -(-context // (self.segment_blocks * BLOCK_KEYS))
        self.slots = divided_tiles * self.segments if self.segments > 1 else 0
        kept = self.slots * config.kv_heads + MOST_BLOCKS * self.segments if self.segments > 1 else 0
        self.token_row = Buffer(4 * limits.tokens)  # of the step's tokens; other kernels read it too
        self.counts = Buffer(8)
        self.tiles = Buffer(ITEM_BYTES * (tiles + self.slots))
        self.splits = Buffer(ITEM_BYTES * splits)
        self.tickets = Buffer(2 * 4 * config.layers)
        self.arrivals = Buffer(4 * limits.rows * config.kv_heads)
        self.arrivals.fill(0)
        self.partial_out = Buffer(4 * splits * config.query_width, "partial results of attention")
        self.partial_ml = Buffer(8 * splits * config.heads)
        self.segment_out = Buffer(4 * kept * TILE_ROWS * config.head_dim, "partial results of attention")
        self.segment_ml = Buffer(16 * kept * 2 * TILE_ROWS)  # of the 256 threads that compute a tile
        self.segment_arrivals = Buffer(4 * self.slots * config.kv_heads * 2)
        self.segment_arrivals.fill(0)

    def as_argument(self) -> CWorkList:
        addresses = (getattr(self, name).pointer for name in (*BUFFERS, *SEGMENT_BUFFERS))
        return CWorkList(*addresses, *(getattr(self, name) for name in SEGMENT_COUNTS))
