"""The ring's owner: lets gateways reach their lanes, and nothing else, without taking part in any operation."""

from __future__ import annotations

from typing import Any

from services.ring.memory import Region
from services.ring.schema import RingGeometry
from services.ring.verbs.device import Device
from services.ring.verbs.grant import LaneGrant, QueuePairAddress, RemoteRegion
from services.ring.verbs.queue_pair import REMOTE_READ, REMOTE_WRITE, QueuePair


class LaneExport:
    """One gateway's way to one lane.

    Its queue pair, protection domain and three regions are its own: a key of another gateway's, guessed or stolen,
    opens nothing here, and closing this revokes what it gave.
    """

    def __init__(
        self, device: Device, ring: Region, geometry: RingGeometry, lane: int, gateway: QueuePairAddress
    ) -> None:
        """Raises VerbsSetupError when the device refuses, ValueError when there is no such lane."""
        if not 0 <= lane < geometry.lanes:
            raise ValueError(f"lane is {lane}, the ring has {geometry.lanes}")
        self._ring = ring
        self._queue_pair = QueuePair(device)
        self._regions: list[Any] = []
        try:
            header = self._register(0, geometry.inbound_offset, writable=False)
            inbound = self._register(geometry.inbound(lane), geometry.inbound_stride, writable=True)
            outbound = self._register(geometry.outbound(lane), geometry.outbound_stride, writable=False)
            self._queue_pair.connect(gateway, answers_only=True)
        except BaseException:
            self.close()
            raise
        self.grant = LaneGrant(lane, geometry.ring_bytes, self._queue_pair.address, header, inbound, outbound)

    def close(self) -> None:
        self._queue_pair.close()
        self._regions.clear()

    def _register(self, offset: int, length: int, *, writable: bool) -> RemoteRegion:
        memory = self._ring[offset : offset + length]
        region = self._queue_pair.register(memory, REMOTE_READ | REMOTE_WRITE if writable else REMOTE_READ)
        self._regions.append(region)
        return RemoteRegion(offset, length, memory.ctypes.data, region.rkey, writable)
