"""Keeps the worker attached to its engine: handshake, session, loss, and again."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from contextlib import closing

from blink.v1 import bootstrap_pb2

from services.common.logging import get_logger
from services.dpu_gateway.arrival import arrive
from services.dpu_gateway.attach import AttachError, Backoff, ask_for_lane, connector_for
from services.dpu_gateway.detokenizer import UnsupportedTokenizerError
from services.dpu_gateway.errors import UnavailableError
from services.dpu_gateway.liveness import EngineLostError
from services.dpu_gateway.model import Model, load_model
from services.dpu_gateway.session import Session
from services.dpu_gateway.settings import GatewaySettings
from services.dpu_gateway.tokenizer import EncodePools
from services.ring.errors import RingError
from services.ring.header import RingInfo, parse_ring_info, start_ring_info
from services.ring.lane import LaneClient
from services.ring.schema import ABI_VERSION, LAYOUT_HASH
from services.ring.transport import PendingRead, Transport

ATTACH_POLL = 0.002


class EngineLink:
    """``on_health(serving)`` is awaited after every change of whether requests can be served; ``on_loss(cause)`` is
    called when an attachment is lost, with the name of an RDMA completion's status, ENGINE_LOST, LANE_LOST ..."""

    def __init__(
        self,
        settings: GatewaySettings,
        bootstrap: str,
        pools: EncodePools,
        on_health: Callable[[bool], Awaitable[None]],
        on_loss: Callable[[str], None] = lambda _cause: None,
    ) -> None:
        self._settings = settings
        self._bootstrap = bootstrap
        self._connector = connector_for(settings)
        self._pools = pools
        self._on_health = on_health
        self._on_loss = on_loss
        self._session: Session | None = None
        self._model: Model | None = None  # kept over re-attachments to the same model
        self._reported: bool | None = None
        self._why = "no engine is attached yet"
        self._log = get_logger(lane_owner=settings.lane_owner)

    @property
    def session(self) -> Session | None:
        return self._session

    def require_session(self) -> Session:
        """The live session. Raises UnavailableError saying why there is none, or why it takes no requests."""
        session = self._session
        if session is None:
            raise UnavailableError(self._why, self._settings.retry_after)
        return session

    @property
    def model(self) -> Model | None:
        """The model last served."""
        return self._model

    async def run(self) -> None:
        """Attach and serve for ever; ends by being cancelled, and then gives the lane back.

        Raises UnsupportedTokenizerError when the first model that is offered can never be served.
        """
        delays = Backoff(self._settings.reattach_delay, self._settings.reattach_longest)
        while True:
            try:
                session = await self._attach()
            except (AttachError, RingError, UnsupportedTokenizerError) as error:
                if isinstance(error, UnsupportedTokenizerError) and self._model is None:
                    raise  # whoever started this worker must hear of it
                self._explain(str(error))
                await self._report(False)
            else:
                attached_at = time.monotonic()
                await self._serve(session)
                # A link that comes and goes, or a gateway of the same name, is tried ever less often, too.
                if time.monotonic() - attached_at >= self._settings.reattach_longest:
                    delays.reset()
            await asyncio.sleep(delays.next())

    async def _serve(self, session: Session) -> None:
        self._log.info("attached", lane=session.lane.lane, engine_epoch=session.engine_epoch)
        reason = "the gateway is stopping"
        watcher = asyncio.create_task(self._watch_health(session))
        self._session = session
        try:
            await session.run()
        except (EngineLostError, RingError) as error:
            reason = str(error)
            self._on_loss(error.cause)
            self._log.warning("engine_unavailable", reason=reason, cause=error.cause)
        finally:
            self._session = None
            watcher.cancel()
            session.fail_all(UnavailableError(reason, self._settings.retry_after))
            self._why = reason
            await self._report(False)
            await session.close()

    async def _watch_health(self, session: Session) -> None:
        while True:
            await self._report(session.liveness.serving)
            await asyncio.sleep(self._settings.watch_interval)

    async def _report(self, serving: bool) -> None:
        if serving != self._reported:
            self._reported = serving
            await self._on_health(serving)

    def _explain(self, why: str) -> None:
        if why != self._why:
            self._log.warning("engine_unavailable", reason=why)
        self._why = why

    async def _attach(self) -> Session:
        settings = self._settings
        request = bootstrap_pb2.AttachRequest(
            gateway_id=settings.lane_owner,
            abi_version=ABI_VERSION,
            layout_hash=LAYOUT_HASH,
            model_fingerprint=settings.model_fingerprint,
        )
        with closing(self._connector(settings)) as connector:
            connector.prepare(request)
            grant = await ask_for_lane(self._bootstrap, settings, request)
            transport = connector.connect(grant)
        try:
            info = await _ring_info(transport, bytes.fromhex(grant.model.fingerprint))
            if self._model is None or self._model.card != grant.model:
                loop = asyncio.get_running_loop()
                self._model = await loop.run_in_executor(
                    self._pools.background, load_model, grant.model, info, self._pools
                )
                gc.collect()
                gc.freeze()  # what stays as long as the process is not looked through again while requests run
            lease_timeout = grant.lease_timeout_ms / 1000
            lane = LaneClient(
                transport,
                info.geometry,
                grant.lane,
                gateway_epoch=grant.gateway_epoch,
                lease_timeout=lease_timeout,
            )
            lane.begin_attach(await _arrived(transport, lane.start_state()))
            deadline = time.monotonic() + settings.attach_timeout
            while not lane.attached(await _arrived(transport, lane.start_state())):
                if time.monotonic() > deadline:
                    raise AttachError(f"the engine did not answer on lane {grant.lane} in {settings.attach_timeout} s")
                await asyncio.sleep(ATTACH_POLL)
            return Session(
                transport=transport,
                info=info,
                lane=lane,
                model=self._model,
                engine_epoch=grant.engine_epoch,
                lease_timeout=lease_timeout,
                settings=settings,
            )
        except BaseException:
            transport.close()
            raise


async def _ring_info(transport: Transport, fingerprint: bytes) -> RingInfo:
    """Twice, as the first read may meet a ring in the making. It is the link's first sign of life, too: whether it
    works at all may take seconds to show, so all of it is awaited."""
    for _ in range(2):
        read = await _arrived(transport, start_ring_info(transport))
        info = parse_ring_info(read.data, transport.size, expected_fingerprint=fingerprint)
    return info


async def _arrived(transport: Transport, read: PendingRead) -> PendingRead:
    await arrive(transport, [read])
    return read
