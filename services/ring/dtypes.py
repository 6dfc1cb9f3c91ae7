"""numpy dtypes of the ring's structs, derived from schema.py: same names, offsets and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np

from services.ring import schema

SCALARS = {"u8": "u1", "u16": "<u2", "u32": "<u4", "i32": "<i4", "f32": "<f4", "u64": "<u8"}


def dtype_of(struct: schema.Struct) -> np.dtype[Any]:
    """The structured dtype of ``struct``; its itemsize is the struct's size."""
    fields = list(struct.offsets())
    return np.dtype(
        {
            "names": [field.name for _, field in fields],
            "formats": [
                (SCALARS[field.type], field.count) if field.count > 1 else SCALARS[field.type] for _, field in fields
            ],
            "offsets": [offset for offset, _ in fields],
            "itemsize": struct.size,
        }
    )


RING_INFO = dtype_of(schema.RING_INFO)
BOOTSTRAP_CONTROL = dtype_of(schema.BOOTSTRAP_CONTROL)
ENGINE_STATUS = dtype_of(schema.ENGINE_STATUS)
ENGINE_COUNTERS = dtype_of(schema.ENGINE_COUNTERS)
LANE_STATUS = dtype_of(schema.LANE_STATUS)
LANE_INBOUND = dtype_of(schema.LANE_INBOUND)
DESCRIPTOR = dtype_of(schema.DESCRIPTOR)
LANE_OUTBOUND = dtype_of(schema.LANE_OUTBOUND)
LOG_ENTRY = dtype_of(schema.LOG_ENTRY)
