"""uvicorn's HTTP protocol with bounds on what it leaves unbounded: a request's head, and a client's time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.dpu_gateway.http.connections import Connections

MAX_HEAD_BYTES = 32 << 10  # request line and headers
HEAD_SECONDS = 20.0  # from a connection, or a request's first byte, to the end of its headers
BODY_SECONDS = 60.0  # from there to the end of its body
WRITE_SECONDS = 30.0  # for a client to read some of an answer that fills the socket


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections that send their request, or read their answer, too slowly, and answers 431 to those that send
    too long a head."""

    def __init__(self, *arguments: Any, all_connections: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._all = all_connections
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None  # of the request
        self._write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._all.opened(self)
        self._expect(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        self._stop_write_timer()
        self._all.closed(self)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._expect(HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._expect(BODY_SECONDS)

    def on_message_complete(self) -> None:
        self._expect_nothing()
        self._all.busy(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        more = bool(self.pipeline)
        super().on_response_complete()
        if not more and not self.transport.is_closing():
            self._all.idle(self)

    def hang_up(self) -> None:
        """Close at once: others need its place."""
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        # abort and not close: what lies in the buffer will never be read
        self._write_deadline = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _stop_write_timer(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(STATUS_LINE[431] + b"connection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    def _expect(self, seconds: float) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
