"""Tensor maps of what attention's prefill tiles copy into shared memory (kernels/attention_ring.cuh)."""

from __future__ import annotations

from services.gpu_engine.cuda.attention_work import TILE_ROWS
from services.gpu_engine.cuda.geometry import BF16_BYTES, Geometry
from services.gpu_engine.cuda.tensor_map import CTensorMap, tensor_map

COLUMNS = 64  # kColumns: two-byte values in the 128 bytes that are swizzled
ROWS = 8  # of a swizzle atom


def query_map(geometry: Geometry, qkv: int, tokens: int) -> CTensorMap:
    """Boxes of 64 columns of one KV head's query heads, for the tokens of a tile.

    Args:
        qkv: address of the fused projection, [tokens, qkv_width] of two bytes.
    """
    config = geometry.config
    return tensor_map(
        qkv,
        shape=(config.head_dim, config.heads, tokens),
        strides=(config.head_dim * BF16_BYTES, geometry.qkv_width * BF16_BYTES),
        box=(COLUMNS, geometry.group, TILE_ROWS // geometry.group),
    )


def page_map(geometry: Geometry, layer_pages: int, pages: int) -> CTensorMap:
    """Boxes of one KV head's keys, or values, of one page: 8 rows of the first 128 bytes, of the next, 8 more rows.

    A row is a key or a value; if these are shorter than 128 bytes, it is two.

    Args:
        layer_pages: address of a layer's part of the KV cache.
        pages: their number.
    """
    heads, width = 2 * geometry.config.kv_heads, COLUMNS * BF16_BYTES
    row = max(geometry.key_bytes, width)
    halves, groups = row // width, geometry.layer_page_bytes // heads // (ROWS * row)
    return tensor_map(
        layer_pages,
        shape=(COLUMNS, ROWS, halves, pages * heads * groups),
        strides=(row, width, ROWS * row),
        box=(COLUMNS, ROWS, halves, groups),
    )
