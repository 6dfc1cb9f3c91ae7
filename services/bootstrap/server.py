"""Serves the handshake from a thread of its own, which sleeps in epoll while no gateway calls."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
from pathlib import Path

import grpc
from blink.v1 import bootstrap_pb2_grpc

from services.bootstrap.errors import BootstrapError
from services.common.logging import get_logger
from services.common.tls import TlsError, TlsFiles, TlsMaterial

UNIX_PREFIX = "unix:"
MAX_UNIX_PATH = 107  # sockaddr_un.sun_path less its final zero
STOP_SECONDS = 1.0

log = get_logger()


class HandshakeServer:
    """A gRPC server for one servicer at ``unix:/path`` (for this user alone) or ``host:port``.

    With ``tls`` it serves only clients that show a certificate from the authority named there.
    """

    def __init__(
        self, address: str, servicer: bootstrap_pb2_grpc.BootstrapServicer, tls: TlsFiles | None = None
    ) -> None:
        self.address = address  # as bound: port 0 becomes the one that was free
        self._servicer = servicer
        self._tls = tls

    def start(self) -> None:
        """Bind and serve. Raises BootstrapError when the address is taken or not ours to bind, TlsError."""
        if self._tls is not None:
            self._tls.read()
        if self.address.startswith(UNIX_PREFIX):
            _make_way(Path(self.address.removeprefix(UNIX_PREFIX)))
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
        asyncio.run_coroutine_threadsafe(self._server.stop(STOP_SECONDS), self._loop).result()
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
        await server.start()
        return server

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


def _make_way(path: Path) -> None:
    """Remove the socket of a killed run; refuse one that is served, as gRPC would take it over in silence."""
    if len(os.fsencode(path)) > MAX_UNIX_PATH:
        raise BootstrapError(f"socket path {path} is too long, at most {MAX_UNIX_PATH} bytes: set BLINK_RUNTIME_DIR")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise BootstrapError(f"cannot listen on {path}: a file that is no socket lies there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise BootstrapError(f"cannot listen on {path}: {error.strerror}") from error
    raise BootstrapError(f"cannot listen on {path}: another bootstrap serves there; stop it or choose another instance")
