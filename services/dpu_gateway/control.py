"""blink.v1.Control: answered from the model card and the ring's header."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NoReturn

import grpc
from blink.v1 import control_pb2 as pb
from blink.v1 import control_pb2_grpc

from services.dpu_gateway.errors import GatewayError, UnavailableError
from services.dpu_gateway.generation import Generations
from services.dpu_gateway.service import require_caller
from services.dpu_gateway.session import Session
from services.ring.errors import RingError
from services.ring.header import RingStatus
from services.ring.schema import EngineState, LanePhase

SERVICE = "blink.v1.Control"

ENGINE_STATES = {
    None: pb.ENGINE_STATE_UNSPECIFIED,
    EngineState.BOOTING: pb.ENGINE_STATE_BOOTING,
    EngineState.READY: pb.ENGINE_STATE_READY,
    EngineState.DRAINING: pb.ENGINE_STATE_DRAINING,
    EngineState.FAILED: pb.ENGINE_STATE_FAILED,
}


class ControlService(control_pb2_grpc.ControlServicer):
    def __init__(self, generations: Generations, retry_after: float) -> None:
        self._generations = generations
        self._link = generations.link
        self._retry_after = retry_after

    async def GetModelInfo(  # noqa: N802 - the name is the API's
        self,
        request: pb.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetModelInfoRequest, pb.GetModelInfoResponse],
    ) -> pb.GetModelInfoResponse:
        await require_caller(self._generations, context)
        model = self._link.model
        if model is None:
            await _abort(context, UnavailableError("no model is known yet: no engine was attached", self._retry_after))
        card, limits = model.card, model.limits
        return pb.GetModelInfoResponse(
            name=card.name,
            architecture=card.architecture,
            fingerprint=card.fingerprint,
            vocabulary_size=limits.vocabulary_size,
            max_context_tokens=limits.max_context_tokens,
            has_chat_template=model.encoder.template.usable,
            eos_token_ids=card.eos_token_ids,
        )

    async def GetLoad(  # noqa: N802
        self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext[pb.GetLoadRequest, pb.GetLoadResponse]
    ) -> pb.GetLoadResponse:
        await require_caller(self._generations, context)
        load = await self._engine_load()
        overloads = self._generations.overloads  # the worker's own count, which goes on over re-attachments
        load.overload.CopyFrom(pb.Overload(**{cause.value: count for cause, count in overloads.items()}))
        return load

    async def _engine_load(self) -> pb.GetLoadResponse:
        session = self._link.session
        if session is not None:
            with suppress(RingError):
                return _load(session, await session.read_status())
        return pb.GetLoadResponse(engine_state=pb.ENGINE_STATE_UNREACHABLE)


def _load(session: Session, status: RingStatus) -> pb.GetLoadResponse:
    engine, counters, lanes = status.engine, status.counters, status.lanes
    attached = lanes[lanes["phase"] == LanePhase.ATTACHED]
    total = len(attached) * session.geometry.slots_per_lane
    return pb.GetLoadResponse(
        engine_state=ENGINE_STATES[session.liveness.state],
        engine_epoch=int(engine["epoch"]),
        heartbeat_age_ms=int(session.liveness.heartbeat_age * 1000),
        running_requests=int(counters["running"]),
        waiting_requests=int(counters["waiting"]),
        total_slots=total,
        free_slots=total - int(attached["running"].sum() + attached["waiting"].sum()),
        total_kv_pages=int(counters["kv_pages_total"]),
        free_kv_pages=int(counters["kv_pages_free"]),
        steps=int(engine["steps"]),
        prompt_tokens=int(counters["prompt_tokens"]),
        generated_tokens=int(counters["generated_tokens"]),
        preemptions=int(counters["preemptions"]),
        rejected_requests=int(lanes["rejected"].sum()),
        lanes=[
            pb.LaneLoad(
                lane=index,
                attached=int(lane["phase"]) == LanePhase.ATTACHED,
                running_requests=int(lane["running"]),
                waiting_requests=int(lane["waiting"]),
                generated_tokens=int(lane["generated_tokens"]),
                log_backlog=int(lane["log_backlog"]),
            )
            for index, lane in enumerate(lanes)
        ],
    )


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: GatewayError) -> NoReturn:
    await context.abort(error.code, str(error), error.trailing_metadata())
