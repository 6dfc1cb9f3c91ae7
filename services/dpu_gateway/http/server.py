"""Serves an HTTP app in the worker's own event loop, on a port that all workers share or on one of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from services.dpu_gateway.http.connections import Connections
from services.dpu_gateway.http.protocol import BoundedProtocol
from services.dpu_gateway.server import PortError

BACKLOG = 2048
CLOSE_SECONDS = 1  # for answers that were ended to leave


class HttpServer:
    """``start``, then ``stop``. ``keep_alive`` in seconds is how long an idle connection may stay, if
    ``max_connections`` leave it its place; ``tls`` makes it HTTPS."""

    def __init__(self, app: ASGIApp, keep_alive: int, max_connections: int, tls: ssl.SSLContext | None = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a client's broken request is no event of ours
        protocol = partial(BoundedProtocol, all_connections=Connections(max_connections))
        config = uvicorn.Config(
            app,
            http=protocol,  # type: ignore[arg-type]  # it is called, and nothing else
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=keep_alive,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            backlog=BACKLOG,
        )
        config.load()
        config.ssl = tls
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._socket: socket.socket | None = None

    async def start(self, address: str, *, shared: bool = True) -> int:
        """Serve at ``host:port`` or ``unix:/path``; the port, 0 for a unix socket. Raises PortError.

        ``shared``: with every process that says so, each of which gets some of the connections.
        """
        self._socket = _listen(address, shared)
        await self._server.startup([self._socket])
        self._ticking = asyncio.create_task(self._server.main_loop(), name="http-dates")
        return 0 if self._socket.family is socket.AF_UNIX else int(self._socket.getsockname()[1])

    async def stop(self) -> None:
        """Take no more connections; end the open ones once their answer is sent, or after a second."""
        if self._socket is None:
            return
        self._server.should_exit = True
        await self._ticking
        await self._server.shutdown([self._socket])


def _listen(address: str, shared: bool) -> socket.socket:
    target: Any
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        path.unlink(missing_ok=True)  # left by a worker that was killed
        family, target = socket.AF_UNIX, str(path)
    else:
        host, _, port = address.rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise PortError(f"cannot listen on {address}: {error}") from error
        family, target = found[0][0], found[0][4]
    protocol = 0 if family is socket.AF_UNIX else socket.IPPROTO_TCP  # asyncio sets TCP_NODELAY only where it is told
    listener = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        if family is not socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        listener.bind(target)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise PortError(f"cannot listen on {address}: {error.strerror}") from error
    return listener
