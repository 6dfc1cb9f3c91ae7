"""Serves the handshake, and the status, from a thread of its own, which sleeps in epoll while nobody calls."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import grpc
from blink.v1 import bootstrap_pb2_grpc

from services.bootstrap.errors import BootstrapError
from services.bootstrap.sockets import make_way
from services.bootstrap.status import StatusSocket
from services.common.logging import get_logger
from services.common.tls import TlsError, TlsFiles, TlsMaterial

UNIX_PREFIX = "unix:"
STOP_SECONDS = 1.0

log = get_logger()


class HandshakeServer:
    """A gRPC server for one servicer at ``unix:/path`` (for this user alone) or ``host:port``.

    With ``tls`` it serves only clients that show a certificate from the authority named there. ``status`` is served
    beside it.
    """

    def __init__(
        self,
        address: str,
        servicer: bootstrap_pb2_grpc.BootstrapServicer,
        tls: TlsFiles | None = None,
        status: StatusSocket | None = None,
    ) -> None:
        self.address = address  # as bound: port 0 becomes the one that was free
        self._servicer = servicer
        self._tls = tls
        self._status = status

    def start(self) -> None:
        """Bind and serve. Raises BootstrapError when the address is taken or not ours to bind, TlsError."""
        if self._tls is not None:
            self._tls.read()
        if self.address.startswith(UNIX_PREFIX):
            make_way(Path(self.address.removeprefix(UNIX_PREFIX)))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="handshake", daemon=True)
        self._thread.start()
        try:
            self._server = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        except BaseException:
            self._end_loop()
            raise

    def stop(self) -> None:
        """Refuse new calls, give running ones a second, remove the socket."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._end_loop()
        if self.address.startswith(UNIX_PREFIX):
            Path(self.address.removeprefix(UNIX_PREFIX)).unlink(missing_ok=True)

    async def _serve(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        bootstrap_pb2_grpc.add_BootstrapServicer_to_server(self._servicer, server)
        mask = os.umask(0o177)
        try:
            if self._tls is None:
                port = server.add_insecure_port(self.address)
            else:
                port = server.add_secure_port(self.address, _credentials(self._tls))
        except RuntimeError as error:
            raise BootstrapError(f"cannot listen on {self.address}: in use or not allowed") from error
        finally:
            os.umask(mask)
        if not self.address.startswith(UNIX_PREFIX):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        if self._status is not None:
            await self._status.start()
        await server.start()
        return server

    async def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
        await self._server.stop(STOP_SECONDS)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Of a server that looks at the files again for every client, and keeps what it had when they can't be read."""
    current = files.read()

    def latest() -> grpc.ServerCertificateConfiguration:
        nonlocal current
        try:
            found = files.read()
        except TlsError as error:
            log.warning("certificates_not_renewed", error=str(error))
            found = current
        if found != current:
            current = found
            log.info("certificates_renewed", certificate=str(files.certificate))
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(_configuration(current), latest, require_client_authentication=True)


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.authority)
