"""The ring's header: written once by its owner, checked by every gateway, read for status and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.ring import _atomics, dtypes, schema
from services.ring.errors import IncompatibleRingError
from services.ring.memory import Region
from services.ring.schema import RingGeometry
from services.ring.transport import PendingRead, Transport

FINGERPRINT_BYTES = 32


@dataclass(frozen=True)
class RingInfo:
    """What a ring is: its sizes, and the model that it serves."""

    geometry: RingGeometry
    fingerprint: bytes  # SHA-256 of the model
    vocabulary_size: int
    max_context_tokens: int
    max_top_logprobs: int = schema.MAX_TOP_LOGPROBS

    def __post_init__(self) -> None:
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"fingerprint has {len(self.fingerprint)} bytes, must have {FINGERPRINT_BYTES}")


@dataclass(frozen=True)
class RingStatus:
    """One read of the header's changing parts. Words are current and untorn, but not all of one instant."""

    engine: np.void  # dtypes.ENGINE_STATUS
    counters: np.void  # dtypes.ENGINE_COUNTERS
    lanes: npt.NDArray[np.void]  # [lanes] of dtypes.LANE_STATUS


def _layout(geometry: RingGeometry) -> dict[str, int]:
    """RingInfo's fields that follow from the geometry."""
    return {
        "lanes": geometry.lanes,
        "slots_per_lane": geometry.slots_per_lane,
        "log_entries": geometry.log_entries,
        "arena_bytes": geometry.arena_bytes,
        "ring_bytes": geometry.ring_bytes,
        "lane_status_offset": geometry.lane_status_offset,
        "inbound_offset": geometry.inbound_offset,
        "inbound_stride": geometry.inbound_stride,
        "doorbells_offset": geometry.doorbells_offset,
        "cancels_offset": geometry.cancels_offset,
        "arena_offset": geometry.arena_offset,
        "outbound_offset": geometry.outbound_offset,
        "outbound_stride": geometry.outbound_stride,
        "slot_status_offset": geometry.slot_status_offset,
        "log_offset": geometry.log_offset,
    }


def format_ring(region: Region, info: RingInfo) -> None:
    """Write RingInfo into a zeroed region, its magic last, so that nobody takes a half-written ring for a whole one.

    Raises ValueError when the region's size is not the geometry's.
    """
    if region.size != info.geometry.ring_bytes:
        raise ValueError(f"region has {region.size} bytes, the ring needs {info.geometry.ring_bytes}")
    record = np.zeros((), dtypes.RING_INFO)
    record["abi_version"] = schema.ABI_VERSION
    record["layout_hash"] = schema.LAYOUT_HASH
    record["fingerprint"] = np.frombuffer(info.fingerprint, np.uint8)
    record["vocabulary_size"] = info.vocabulary_size
    record["max_context_tokens"] = info.max_context_tokens
    record["max_top_logprobs"] = info.max_top_logprobs
    for name, value in _layout(info.geometry).items():
        record[name] = value
    start = schema.header_offset(schema.RING_INFO)
    _atomics.store(region, start, record.tobytes())  # magic is still 0
    _atomics.store_release(region, start + schema.RING_INFO.offset_of("magic"), schema.MAGIC)


def read_ring_info(transport: Transport, *, expected_fingerprint: bytes | None = None) -> RingInfo:
    """Read and check RingInfo.

    Raises:
        IncompatibleRingError: naming which of magic, ABI, layout hash, sizes or fingerprint differs, with both values.
    """
    for _ in range(2):  # the magic is written last: a read that follows one with the magic in it has all the rest
        read = start_ring_info(transport)
        transport.complete([read])
        _require_magic(read.data)
    return parse_ring_info(read.data, transport.size, expected_fingerprint=expected_fingerprint)


def start_ring_info(transport: Transport) -> PendingRead:
    """Begin a read of RingInfo, for ``parse_ring_info``. Raises IncompatibleRingError when the ring is too small."""
    start = schema.header_offset(schema.RING_INFO)
    if transport.size < start + schema.RING_INFO.size:
        raise IncompatibleRingError("size", f"at least {start + schema.RING_INFO.size} bytes", transport.size)
    return transport.start_read(start, schema.RING_INFO.size)


def _require_magic(data: bytes) -> None:
    magic = int.from_bytes(data[:8], "little")
    if magic != schema.MAGIC:
        raise IncompatibleRingError("magic", f"{schema.MAGIC:#x}", f"{magic:#x}")


def parse_ring_info(data: bytes, size: int, *, expected_fingerprint: bytes | None = None) -> RingInfo:
    """Check what was read of a ring of ``size`` bytes; raises what ``read_ring_info`` does.

    Of a ring that may be in the making only a second read counts, once one with the magic in it was back.
    """
    _require_magic(data)
    record = np.frombuffer(data, dtypes.RING_INFO)[0]
    for field, expected in (("abi_version", schema.ABI_VERSION), ("layout_hash", schema.LAYOUT_HASH)):
        if record[field] != expected:
            raise IncompatibleRingError(field, expected, int(record[field]))
    try:
        geometry = RingGeometry(
            lanes=int(record["lanes"]),
            slots_per_lane=int(record["slots_per_lane"]),
            arena_bytes=int(record["arena_bytes"]),
            log_entries=int(record["log_entries"]),
        )
    except ValueError as error:
        raise IncompatibleRingError("geometry", "sizes within the limits", str(error)) from error
    for field, expected in _layout(geometry).items():
        if record[field] != expected:
            raise IncompatibleRingError(field, expected, int(record[field]))
    if size < geometry.ring_bytes:
        raise IncompatibleRingError("size", f"{geometry.ring_bytes} bytes", size)
    fingerprint = record["fingerprint"].tobytes()
    if expected_fingerprint is not None and fingerprint != expected_fingerprint:
        raise IncompatibleRingError("model fingerprint", expected_fingerprint.hex(), fingerprint.hex())
    return RingInfo(
        geometry=geometry,
        fingerprint=fingerprint,
        vocabulary_size=int(record["vocabulary_size"]),
        max_context_tokens=int(record["max_context_tokens"]),
        max_top_logprobs=int(record["max_top_logprobs"]),
    )


def read_status(transport: Transport, geometry: RingGeometry) -> RingStatus:
    """Engine status, counters and all lanes' summaries in one bulk read."""
    return parse_status(transport.read(*_status_span(geometry)), geometry)


def start_status(transport: Transport, geometry: RingGeometry) -> PendingRead:
    """Begin that read; its data is for ``parse_status``."""
    return transport.start_read(*_status_span(geometry))


def parse_status(data: bytes, geometry: RingGeometry) -> RingStatus:
    start = _status_span(geometry)[0]

    def view(dtype: np.dtype[Any], offset: int, count: int) -> npt.NDArray[np.void]:
        return np.frombuffer(data, dtype, count, offset - start)

    return RingStatus(
        engine=view(dtypes.ENGINE_STATUS, start, 1)[0],
        counters=view(dtypes.ENGINE_COUNTERS, schema.header_offset(schema.ENGINE_COUNTERS), 1)[0],
        lanes=view(dtypes.LANE_STATUS, geometry.lane_status_offset, geometry.lanes),
    )


def _status_span(geometry: RingGeometry) -> tuple[int, int]:
    """Offset and length of what changes in the header."""
    start = schema.header_offset(schema.ENGINE_STATUS)
    return start, geometry.lane_status_offset + geometry.lanes * schema.LANE_STATUS.size - start
