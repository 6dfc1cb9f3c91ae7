"""The ring's owner: lets gateways reach their lanes, and nothing else, without taking part in any operation."""

from __future__ import annotations

from typing import Any

from services.ring.parts import HostPart, RingParts
from services.ring.schema import RingGeometry
from services.ring.verbs.device import Device
from services.ring.verbs.grant import LaneGrant, QueuePairAddress, RemoteRegion
from services.ring.verbs.queue_pair import REMOTE_READ, REMOTE_WRITE, QueuePair


class LaneExport:
    """One gateway's way to one lane.

    Its queue pair, protection domain and three regions are its own: a key of another gateway's, guessed or stolen,
    opens nothing here, and closing this revokes what it gave. ``parts`` hold the ring, each area in one of them.
    """

    def __init__(
        self, device: Device, parts: RingParts, geometry: RingGeometry, lane: int, gateway: QueuePairAddress
    ) -> None:
        """Raises VerbsSetupError when the device refuses, ValueError when there is no such lane."""
        if not 0 <= lane < geometry.lanes:
            raise ValueError(f"lane is {lane}, the ring has {geometry.lanes}")
        self._parts = parts
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
        access = REMOTE_READ | REMOTE_WRITE if writable else REMOTE_READ
        part = next(part for part in self._parts if part.start <= offset < part.start + part.length)
        inside = offset - part.start
        if isinstance(part, HostPart):
            memory = part.region[inside : inside + length]
            region, address = self._queue_pair.register(memory, access), memory.ctypes.data
        else:
            region, address = self._queue_pair.register_dma_buf(part.fd, inside, length, access)
        self._regions.append(region)
        return RemoteRegion(offset, length, address, region.rkey, writable)
