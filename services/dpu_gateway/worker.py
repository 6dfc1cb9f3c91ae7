"""One gateway worker: attaches to the engine, serves, drains."""

from __future__ import annotations

import asyncio
import resource
import signal
from pathlib import Path

import uvloop

from services.common.logging import get_logger
from services.common.runtime import bootstrap_address, runtime_directory
from services.dpu_gateway.access.callers import Access
from services.dpu_gateway.access.keys import KeyFile
from services.dpu_gateway.access.limits import Limits, limits_path
from services.dpu_gateway.control import ControlService
from services.dpu_gateway.errors import UnavailableError
from services.dpu_gateway.generation import Generations
from services.dpu_gateway.http.app import HttpApi
from services.dpu_gateway.http.server import HttpServer
from services.dpu_gateway.link import EngineLink
from services.dpu_gateway.metrics.exposition import Exposition
from services.dpu_gateway.metrics.gateway import GatewayMetrics
from services.dpu_gateway.metrics.sharing import SharedFigures
from services.dpu_gateway.peers import Peers, socket_path
from services.dpu_gateway.server import Health, build_server, listen
from services.dpu_gateway.service import InferenceService
from services.dpu_gateway.settings import GatewaySettings
from services.dpu_gateway.tls import IngressTls
from services.dpu_gateway.tokenizer import EncodePools
from services.dpu_gateway.tracing import otlp_tracer
from services.dpu_gateway.vllm_engine.service import VllmEngineService

LAST_WORDS = 1.0  # seconds for the statuses of ended streams to leave
STOP_GRACE = 0.2  # seconds for calls other than Generate
PROBE_CONNECTIONS = 64


class Worker:
    """``start``, then ``drain``. ``directory`` holds the peers' sockets; ``figures``, when there are any, are shared
    with them."""

    def __init__(self, settings: GatewaySettings, directory: Path, figures: SharedFigures | None = None) -> None:
        self._settings = settings
        self._pools = EncodePools(settings.tokenizer_threads)
        self._health = Health()
        bootstrap = settings.bootstrap or bootstrap_address(settings.instance)
        metrics = GatewayMetrics()
        self.link = EngineLink(
            settings, bootstrap, self._pools, self._health.report, lambda cause: metrics.losses.labels(cause).inc()
        )
        self._peers = Peers(directory, settings.instance, settings.worker)
        self._figures = figures
        self._access = _access(settings, directory)
        self._tracer = (
            otlp_tracer(settings.trace_endpoint, settings.lane_owner, settings.trace_ratio)
            if settings.trace_endpoint
            else None
        )
        self.generations = Generations(
            self.link,
            metrics,
            self._access,
            retry_after=settings.retry_after,
            write_limit=settings.write_limit,
            tracer=self._tracer,
        )
        handlers = (
            InferenceService(self.generations, self._peers).handler(),
            VllmEngineService(self.generations, self._peers, settings.retry_after).handler(),
        )
        controller = ControlService(self.generations, settings.retry_after)
        self._server = build_server(settings, handlers, controller, self._health)
        exposition = Exposition(self.link, metrics.collect if figures is None else figures.collect)
        api = HttpApi(
            self.generations,
            exposition,
            retry_after=settings.retry_after,
            max_body_bytes=settings.max_message_bytes,
        )
        self._tls = _ingress_tls(settings)
        self._http = HttpServer(
            api.app(),
            settings.http_keep_alive,
            settings.most_http_connections,
            self._tls.http() if self._tls else None,
        )
        self._probes = HttpServer(api.probes(), settings.http_keep_alive, PROBE_CONNECTIONS)
        self._socket = socket_path(directory, settings.instance, settings.worker)
        self._log = get_logger()
        self.port = self.http_port = self.health_port = 0

    async def start(self) -> None:
        """Listen and begin to attach. Raises PortError."""
        await self._health.report(False)
        self.port = listen(self._server, self._settings.listen, self._tls.grpc() if self._tls else None)
        listen(self._server, f"unix:{self._socket}")
        await self._server.start()
        if self._settings.serves_http:
            self.http_port = await self._http.start(self._settings.http_listen)
        if self._settings.serves_health:
            self.health_port = await self._probes.start(self._settings.health_listen, shared=False)
        self.link_task = asyncio.create_task(self.link.run(), name="engine-link")
        self._log.info(
            "listening",
            address=self._settings.listen,
            port=self.port,
            http_address=self._settings.http_listen,
            http_port=self.http_port,
            health_address=self._settings.health_listen,
            health_port=self.health_port,
        )

    async def drain(self) -> None:
        """Refuse what is new, let open streams finish within the drain limit, end the rest with a status, stop.

        The server itself stops last: it answers new calls with CANCELLED while it does, and callers are promised
        UNAVAILABLE.
        """
        limit = self._settings.drain_limit
        self._log.info("draining", open_streams=self.generations.open_streams, limit_seconds=limit)
        self.generations.draining = True
        await self._health.stop()
        if not await self._idle_within(limit):
            self._log.warning("drain_limit_reached", open_streams=self.generations.open_streams)
            if self.link.session is not None:
                self.link.session.fail_all(UnavailableError("the gateway stopped", self._settings.retry_after))
            await self._idle_within(LAST_WORDS)
        await asyncio.gather(self._server.stop(STOP_GRACE), self._http.stop(), self._probes.stop())
        await self._close()
        self._log.info("stopped")

    async def _idle_within(self, limit: float) -> bool:
        try:
            await asyncio.wait_for(self.generations.wait_until_idle(), limit)
        except TimeoutError:
            return False
        return True

    async def _close(self) -> None:
        self.link_task.cancel()
        await asyncio.wait([self.link_task])
        await self._peers.close()
        self._pools.shutdown()
        self._access.close()
        if self._tracer is not None:  # may wait for a collector that does not answer
            await asyncio.to_thread(self._tracer.close)
        self._socket.unlink(missing_ok=True)
        if self._figures is not None:
            self._figures.remove()


def _access(settings: GatewaySettings, directory: Path) -> Access:
    if settings.api_keys is None:
        return Access()
    limits = Limits(limits_path(directory, settings.instance), settings.worker, settings.retry_after)
    return Access(KeyFile(settings.api_keys), limits)


def _ingress_tls(settings: GatewaySettings) -> IngressTls | None:
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    return IngressTls(settings.tls_certificate, settings.tls_key, settings.tls_client_authority)


def _allow_many_connections() -> None:
    """Take as many file descriptors as the system lets us have: each connection needs one, and the usual soft limit of
    1,024 would let idle ones keep out everybody else."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve(settings: GatewaySettings) -> int:
    """Run until SIGTERM or SIGINT, drain, and return the exit code. Raises what ended the engine's link for good."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    directory = runtime_directory()
    figures = SharedFigures(SharedFigures.directory(directory, settings.instance), settings.worker)
    figures.open()
    worker = Worker(settings, directory, figures)
    await worker.start()
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((stopped, worker.link_task), return_when=asyncio.FIRST_COMPLETED)
    broken = worker.link_task.exception() if worker.link_task.done() else None
    await worker.drain()
    if broken is not None:
        raise broken
    return 0


def main(settings: GatewaySettings) -> int:
    _allow_many_connections()
    return uvloop.run(serve(settings))
