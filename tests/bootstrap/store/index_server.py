"""A package index on localhost that can be told to misbehave."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONTENT_TYPE = "application/vnd.pypi.simple.v1+json"


@dataclass
class IndexServer:
    """Serves ``/simple/<project>/`` and ``/files/<name>`` on a free port until ``close``."""

    project: str
    filename: str
    content: bytes
    cut_after: list[int] = field(default_factory=list)  # the next responses break off after so many bytes
    ranges: bool = True  # honour Range
    status: int = 200  # of the file
    requests: list[str] = field(default_factory=list)  # Range header of each file request

    def __post_init__(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == f"/simple/{outer.project}/":
                    outer._page(self)
                elif self.path == f"/files/{outer.filename}":
                    outer._file(self)
                else:
                    self.send_error(404)

            def log_message(self, *_arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/simple/"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _page(self, handler: BaseHTTPRequestHandler) -> None:
        file = {"filename": self.filename, "url": f"/files/{self.filename}", "hashes": {}}
        page = {"meta": {"api-version": "1.0"}, "name": self.project, "files": [file]}
        body = json.dumps(page).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", CONTENT_TYPE)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def _file(self, handler: BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range", "")
        self.requests.append(wanted)
        if self.status != 200:
            handler.send_error(self.status)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if start >= len(self.content):
            handler.send_error(416)
            return
        body = self.content[start:]
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: self.cut_after.pop(0)] if self.cut_after else body)
