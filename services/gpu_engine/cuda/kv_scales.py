"""What an FP8 cache's keys and values are divided by before they are rounded to e4m3 (kernels/kv_cache.cuh)."""

from __future__ import annotations

import ctypes


class CKvScales(ctypes.Structure):
    """``blink::KvScales``, of a layer."""

    _fields_ = (("key", ctypes.c_float), ("value", ctypes.c_float))


NO_SCALES = CKvScales(1.0, 1.0)
