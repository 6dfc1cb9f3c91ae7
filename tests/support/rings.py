"""Rings for tests: small ones in private memory."""

from __future__ import annotations

from services.ring.header import RingInfo, format_ring
from services.ring.memory import Region, allocate_region
from services.ring.schema import RingGeometry
from tests.support.stand_in_engine import FINGERPRINT


def ring_info(*, lanes: int = 1, slots: int = 8, arena_bytes: int = 1 << 16, log_entries: int = 128) -> RingInfo:
    return RingInfo(
        geometry=RingGeometry(lanes, slots, arena_bytes, log_entries),
        fingerprint=FINGERPRINT,
        vocabulary_size=49_152,
        max_context_tokens=8_192,
    )


def private_ring(info: RingInfo) -> Region:
    """A formatted ring in this process's memory."""
    region = allocate_region(info.geometry.ring_bytes)
    format_ring(region, info)
    return region
