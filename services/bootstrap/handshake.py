"""The handshake service: lanes for gateways. Idle unless a gateway attaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from blink.v1 import bootstrap_pb2, bootstrap_pb2_grpc

from services.bootstrap.errors import NoFreeLaneError
from services.bootstrap.lanes import LaneTable
from services.common.logging import get_logger
from services.ring.schema import ABI_VERSION, LAYOUT_HASH

MAX_GATEWAY_ID = 128

log = get_logger()


@dataclass(frozen=True)
class Offer:
    """What a READY engine offers to gateways."""

    engine_epoch: int
    ring_path: Path
    card: bootstrap_pb2.ModelCard
    lease_timeout_ms: int
    lanes: LaneTable
    lane_phases: Callable[[], Sequence[int]]  # [lanes] of LanePhase, read from the ring


class Handshake(bootstrap_pb2_grpc.BootstrapServicer):
    """Answers Attach; refuses while there is no offer, saying why."""

    def __init__(self) -> None:
        self._offer: Offer | None = None
        self._reason = "the engine is loading"

    def publish(self, offer: Offer) -> None:
        """From now on gateways may attach. May be called from any thread."""
        self._offer = offer

    def withdraw(self, reason: str) -> None:
        """From now on every Attach ends with UNAVAILABLE and ``reason``."""
        self._reason = reason
        self._offer = None

    async def Attach(  # noqa: N802 (the name in the proto)
        self,
        request: bootstrap_pb2.AttachRequest,
        context: grpc.aio.ServicerContext[bootstrap_pb2.AttachRequest, bootstrap_pb2.AttachResponse],
    ) -> bootstrap_pb2.AttachResponse:
        if not 1 <= len(request.gateway_id) <= MAX_GATEWAY_ID:
            length = len(request.gateway_id)
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"gateway_id has {length} characters, must have 1 to {MAX_GATEWAY_ID}"
            )
        ours: tuple[tuple[str, Any, Any], ...] = (
            ("abi_version", request.abi_version, ABI_VERSION),
            ("layout_hash", f"{request.layout_hash:#018x}", f"{LAYOUT_HASH:#018x}"),
        )
        for field, theirs, expected in ours:
            if theirs != expected:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"{field} of the gateway is {theirs}, of this bootstrap {expected}: run the same build",
                )
        offer = self._offer
        if offer is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._reason)
        try:
            grant = offer.lanes.grant(request.gateway_id, offer.lane_phases())
        except NoFreeLaneError as error:
            log.warning("attach_refused", gateway_id=request.gateway_id, error=str(error))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        log.info("lane_granted", gateway_id=request.gateway_id, lane=grant.lane, gateway_epoch=grant.gateway_epoch)
        return bootstrap_pb2.AttachResponse(
            lane=grant.lane,
            gateway_epoch=grant.gateway_epoch,
            engine_epoch=offer.engine_epoch,
            shm=bootstrap_pb2.ShmDescriptor(path=str(offer.ring_path)),
            model=offer.card,
            lease_timeout_ms=offer.lease_timeout_ms,
        )
