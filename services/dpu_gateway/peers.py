"""The other workers of the same port, reached over private unix sockets."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import grpc
from blink.v1 import inference_pb2, inference_pb2_grpc

from services.dpu_gateway.streams import RequestName

FORWARDED = "blink-forwarded-for"
TIMEOUT = 1.0


def socket_path(directory: Path, instance: str, worker: int) -> Path:
    """Where one worker listens for its peers."""
    return directory / f"gateway-{instance}-{worker}.sock"


def forwarded_for(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """For whose requests a peer calls, so that the call is not forwarded again and shows no key; None for no peer's.

    Peers come by sockets in a directory that is this user's alone; anybody may send metadata.
    """
    if not context.peer().startswith("unix:"):
        return None
    return next((str(value) for key, value in context.invocation_metadata() or () if key == FORWARDED), None)


class Peers:
    """Finds the peers' sockets anew for each call: workers come and go. A dead one's socket is no failure."""

    def __init__(self, directory: Path, instance: str, worker: int) -> None:
        self._directory = directory
        # A glob would also match the sockets of an instance whose name begins with this one's.
        self._name = re.compile(rf"gateway-{re.escape(instance)}-\d+\.sock")
        self._own = socket_path(directory, instance, worker)
        self._channels: dict[Path, grpc.aio.Channel] = {}

    async def abort(self, name: RequestName) -> bool:
        """Ask every peer at once; whether any of them had the request."""
        paths = [path for path in self._directory.iterdir() if self._name.fullmatch(path.name) and path != self._own]
        return any(await asyncio.gather(*(self._abort_at(path, name) for path in paths)))

    async def _abort_at(self, path: Path, name: RequestName) -> bool:
        if path not in self._channels:
            self._channels[path] = grpc.aio.insecure_channel(f"unix:{path}")
        stub = inference_pb2_grpc.InferenceStub(self._channels[path])
        request = inference_pb2.AbortRequest(request_id=name.request_id)
        try:
            response = await stub.Abort(request, timeout=TIMEOUT, metadata=((FORWARDED, name.owner),))
        except grpc.aio.AioRpcError:
            return False
        return response.found

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
