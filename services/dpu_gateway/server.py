"""The worker's gRPC server: the API on the shared port, the same for peers on a private unix socket."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc
from blink.v1 import control_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.errors import BlinkError
from services.dpu_gateway import control, service
from services.dpu_gateway.control import ControlService
from services.dpu_gateway.settings import GatewaySettings

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
HANDSHAKE_MS = 20_000  # for a connection to speak TLS, if that is asked for, and HTTP/2
SERVICES = ("", service.SERVICE, control.SERVICE)


class PortError(BlinkError):
    """The worker cannot listen where it was told to."""


class Health:
    """grpc.health.v1 for each service and for the server as a whole (the empty name)."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()
        self._stopped = False

    async def report(self, serving: bool) -> None:
        """Inference can be served or not. Control always answers while the server does."""
        if self._stopped:
            return
        for name in ("", service.SERVICE):
            await self.servicer.set(name, SERVING if serving else NOT_SERVING)
        await self.servicer.set(control.SERVICE, SERVING)

    async def stop(self) -> None:
        """NOT_SERVING for good."""
        self._stopped = True
        for name in SERVICES:
            await self.servicer.set(name, NOT_SERVING)


def build_server(
    settings: GatewaySettings,
    handlers: Sequence[grpc.GenericRpcHandler],
    controller: ControlService,
    health_service: Health,
) -> grpc.aio.Server:
    """``handlers`` are of the services that generate."""
    server = grpc.aio.server(options=_options(settings))
    server.add_generic_rpc_handlers(tuple(handlers))
    control_pb2_grpc.add_ControlServicer_to_server(controller, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_service.servicer, server)
    names = (service.SERVICE, control.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


def listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Bind ``address`` (HOST:PORT or unix:PATH); the port, 0 or 1 for a unix socket. Raises PortError."""
    if address.startswith("unix:"):
        Path(address.removeprefix("unix:")).unlink(missing_ok=True)  # left by a worker that was killed
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise PortError(f"cannot listen on {address}: is the port in use, or the address not this host's?") from error


def _options(settings: GatewaySettings) -> list[tuple[str, int]]:
    interval, timeout = int(settings.keepalive_interval * 1000), int(settings.keepalive_timeout * 1000)
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", interval),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", interval // 3),
    ]
