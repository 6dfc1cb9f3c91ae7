"""The handshake service: lanes for gateways. Idle unless a gateway attaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from blink.v1 import bootstrap_pb2, bootstrap_pb2_grpc

from services.bootstrap.errors import NoFreeLaneError
from services.bootstrap.exports import Exports
from services.bootstrap.identity import peer_name
from services.bootstrap.lanes import LaneTable
from services.common.logging import get_logger
from services.ring.errors import RingError
from services.ring.schema import ABI_VERSION, LAYOUT_HASH, LanePhase
from services.ring.verbs.grant import QueuePairAddress

MAX_GATEWAY_ID = 128

log = get_logger()
Context = grpc.aio.ServicerContext[bootstrap_pb2.AttachRequest, bootstrap_pb2.AttachResponse]


@dataclass(frozen=True)
class Offer:
    """What a READY engine offers to gateways."""

    engine_epoch: int
    ring_path: Path
    card: bootstrap_pb2.ModelCard
    lease_timeout_ms: int
    lanes: LaneTable
    lane_phases: Callable[[], Sequence[int]]  # [lanes] of LanePhase, read from the ring
    exports: Exports | None = None  # None: by shared memory


class RefusedError(Exception):
    """Why a gateway gets no lane: the call's status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


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

    async def Attach(self, request: bootstrap_pb2.AttachRequest, context: Context) -> bootstrap_pb2.AttachResponse:  # noqa: N802 (the name in the proto)
        name = peer_name(context.auth_context())
        try:
            return self._attach(request, name)
        except RefusedError as refusal:
            log.warning("attach_refused", gateway_id=request.gateway_id, certificate=name, error=str(refusal))
            await context.abort(refusal.code, str(refusal))

    def _attach(self, request: bootstrap_pb2.AttachRequest, name: str) -> bootstrap_pb2.AttachResponse:
        if not 1 <= len(request.gateway_id) <= MAX_GATEWAY_ID:
            length = len(request.gateway_id)
            raise RefusedError(
                grpc.StatusCode.INVALID_ARGUMENT, f"gateway_id has {length} characters, must have 1 to {MAX_GATEWAY_ID}"
            )
        _require_equal("abi_version", request.abi_version, ABI_VERSION, "run the same build")
        _require_equal("layout_hash", f"{request.layout_hash:#018x}", f"{LAYOUT_HASH:#018x}", "run the same build")
        offer = self._offer
        if offer is None:
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, self._reason)
        if request.model_fingerprint:
            served = offer.card.fingerprint
            _require_equal("model_fingerprint", request.model_fingerprint, served, f"it serves {offer.card.name}")
        transport = "verbs" if request.HasField("queue_pair") else "shm"
        offered = "shm" if offer.exports is None else "verbs"
        _require_equal("transport", transport, offered, "set both to the same")
        answer = bootstrap_pb2.AttachResponse(
            engine_epoch=offer.engine_epoch,
            model=offer.card,
            lease_timeout_ms=offer.lease_timeout_ms,
            abi_version=ABI_VERSION,
            layout_hash=LAYOUT_HASH,
        )
        try:
            gateway = QueuePairAddress.of(request.queue_pair) if offer.exports else None
        except ValueError as error:
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        phases = offer.lane_phases()
        try:
            lane = offer.lanes.grant((name, request.gateway_id), phases, name)
        except NoFreeLaneError as error:
            raise RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error
        if offer.exports is None or gateway is None:
            answer.shm.path = str(offer.ring_path)
        else:
            try:
                grant = offer.exports.grant(lane.lane, gateway)
            except RingError as error:
                raise RefusedError(grpc.StatusCode.INTERNAL, str(error)) from error
            answer.verbs.CopyFrom(bootstrap_pb2.LaneGrant(**asdict(grant)))
        answer.lane, answer.gateway_epoch = lane.lane, lane.gateway_epoch
        log.info(
            "lane_granted",
            gateway_id=request.gateway_id,
            certificate=name,
            transport=transport,
            lane=lane.lane,
            gateway_epoch=lane.gateway_epoch,
            taken_over=phases[lane.lane] != LanePhase.FREE,  # again and again: two gateways with one gateway_id
        )
        return answer


def _require_equal(field: str, theirs: object, ours: object, advice: str) -> None:
    if theirs != ours:
        raise RefusedError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{field} of the gateway is {theirs}, of this bootstrap {ours}: {advice}",
        )
