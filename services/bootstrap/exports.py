"""Ways to the ring's lanes by RDMA, one for each gateway that asked for one."""

from __future__ import annotations

from typing import Protocol

from services.bootstrap.settings import BootstrapSettings
from services.common.logging import get_logger
from services.ring.parts import RingParts
from services.ring.schema import RingGeometry
from services.ring.verbs.grant import LaneGrant, QueuePairAddress

log = get_logger()


class Exports(Protocol):
    """What the handshake needs of them."""

    def grant(self, lane: int, gateway: QueuePairAddress) -> LaneGrant:
        """Let ``gateway`` reach the lane, and nobody else any longer. Raises RingError."""


class Closable(Protocol):
    def close(self) -> None: ...


class VerbsExports:
    """Registers each lane when it is granted, so what no gateway holds no NIC can reach.

    ``close`` revokes everything.
    """

    def __init__(self, settings: BootstrapSettings, parts: RingParts, geometry: RingGeometry) -> None:
        """``parts`` may be changed until the first grant. Raises RingError: no pyverbs, or no device to be used."""
        from services.ring.verbs.device import Device  # noqa: PLC0415 (needs pyverbs)

        self._device = Device(
            settings.rdma_device, port=settings.rdma_port, gid_index=settings.rdma_gid_index, mtu=settings.rdma_mtu
        )
        self.parts = parts
        self._geometry = geometry
        self._exports: dict[int, Closable] = {}
        log.info("rdma_device", device=self._device.name, gid=self._device.gid, mtu=self._device.mtu)

    def grant(self, lane: int, gateway: QueuePairAddress) -> LaneGrant:
        from services.ring.verbs.export import LaneExport  # noqa: PLC0415 (needs pyverbs)

        if (old := self._exports.pop(lane, None)) is not None:
            old.close()
        export = LaneExport(self._device, self.parts, self._geometry, lane, gateway)
        self._exports[lane] = export
        return export.grant

    def close(self) -> None:
        for export in self._exports.values():
            export.close()
        self._exports.clear()
        self._device.close()
