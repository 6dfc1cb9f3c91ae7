"""An Abort goes to the other workers of the same instance, and to nobody else."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from blink.v1 import inference_pb2

from services.dpu_gateway.peers import Peers, socket_path
from services.dpu_gateway.service import SERVICE
from services.dpu_gateway.streams import RequestName


def worker_handler(name: str, asked: list[str]) -> grpc.GenericRpcHandler:
    """A worker that has every request which it is asked to abort, and notes that it was asked."""

    async def abort(
        request: inference_pb2.AbortRequest,
        context: grpc.aio.ServicerContext[inference_pb2.AbortRequest, inference_pb2.AbortResponse],
    ) -> inference_pb2.AbortResponse:
        asked.append(name)
        return inference_pb2.AbortResponse(found=True)

    method = grpc.unary_unary_rpc_method_handler(
        abort, inference_pb2.AbortRequest.FromString, inference_pb2.AbortResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Abort": method})


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="blink-"))  # short: a unix socket's path has 107 bytes
    yield path
    shutil.rmtree(path)


async def asked_by(directory: Path, peers: Peers, instances: list[tuple[str, int]]) -> tuple[bool, set[str]]:
    """What an Abort finds, and which of these workers it reaches."""
    asked: list[str] = []
    servers = []
    for instance, worker in instances:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((worker_handler(f"{instance}/{worker}", asked),))
        server.add_insecure_port(f"unix:{socket_path(directory, instance, worker)}")
        await server.start()
        servers.append(server)
    try:
        return await peers.abort(RequestName("", "r")), set(asked)
    finally:
        await peers.close()
        for server in servers:
            await server.stop(None)


async def test_every_other_worker_of_the_instance_is_asked(directory: Path) -> None:
    (directory / "gateway-prod-7.sock").touch()  # a dead worker's
    peers = Peers(directory, "prod", 0)
    found, asked = await asked_by(directory, peers, [("prod", 0), ("prod", 1), ("prod", 12)])
    assert found
    assert asked == {"prod/1", "prod/12"}


async def test_an_instance_whose_name_begins_with_this_ones_is_left_alone(directory: Path) -> None:
    peers = Peers(directory, "prod", 0)
    found, asked = await asked_by(directory, peers, [("prod-2", 0), ("prod-2", 1), ("prod-a", 0), ("my-prod", 0)])
    assert not found
    assert asked == set()
