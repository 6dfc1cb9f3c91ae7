"""Connections that only cost: thousands of idle ones, noise, half a handshake. Everybody else is served."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import httpx2
import psutil
import pytest
from blink.v1 import inference_pb2_grpc

from tests.dpu_gateway.harness import LEASE_TIMEOUT_MS, MODEL, collect, gateway, max_tokens, text_request, until
from tests.dpu_gateway.test_drain import WorkerProcess, worker_process
from tests.support.stand_in_engine import Behaviour

IDLE = 10_000
SPARE = 500  # descriptors for everything else
HOST = "127.0.0.1"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture
def many_files() -> Iterator[int]:
    """How many connections this process may open, at most IDLE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield min(IDLE, hard - SPARE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def serves(worker: WorkerProcess) -> None:
    """A request by each protocol, over connections of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"{HOST}:{worker.port}", options=options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert len((await collect(stub.Generate(text_request(stop=max_tokens(3))))).ids) == 3
    async with httpx2.AsyncClient(base_url=f"http://{HOST}:{worker.http_port}", timeout=60) as http:
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 3}
        assert (await http.post("/v1/completions", json=body)).status_code == 200


def connect(stack: ExitStack, port: int, count: int, first: bytes = b"") -> None:
    for _ in range(count):
        connection = stack.enter_context(socket.create_connection((HOST, port), timeout=60))
        if first:
            connection.sendall(first)


@pytest.mark.timeout(300)  # on a machine that does much else
@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_ten_thousand_idle_connections_keep_nobody_out_and_leave_nothing(protocol: str, many_files: int) -> None:
    behaviour = Behaviour(lease_timeout=LEASE_TIMEOUT_MS / 1000)
    async with gateway(behaviour, workers=0) as system, worker_process(system, "--heartbeat-timeout=30") as worker:
        await serves(worker)
        process = psutil.Process(worker.process.pid)
        before = process.num_fds()
        with ExitStack() as stack:
            port = worker.http_port if protocol == "http" else worker.port
            await asyncio.to_thread(connect, stack, port, many_files)
            await serves(worker)
            limit, _ = process.rlimit(psutil.RLIMIT_NOFILE)
            assert process.num_fds() < limit
        await serves(worker)
        await until(lambda: process.num_fds() <= before + 1)  # gRPC may keep a polling descriptor more


NOISE = [
    ("grpc", b"\x00" * 64),
    ("grpc", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"),
    ("grpc", PREFACE),
    ("grpc", PREFACE + b"\xff\xff\xff\x01\x00\x00\x00\x00\x01"),  # a frame of 16 MiB
    ("grpc", PREFACE[:10]),
    ("http", PREFACE),
    ("http", b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n"),
    ("http", b"GET /health HTTP/1.1\r\ncontent-length: -1\r\n\r\n"),
    ("http", b"GET /health HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n"),
    ("http", b"GET http://\xff[/%zz HTTP/1.1\r\nhost: \x01\r\n\r\n"),
]


async def test_noise_at_the_door_is_no_event_and_holds_nobody_up() -> None:
    behaviour = Behaviour(lease_timeout=LEASE_TIMEOUT_MS / 1000)
    async with gateway(behaviour, workers=0) as system, worker_process(system, "--heartbeat-timeout=30") as worker:
        await serves(worker)
        process = psutil.Process(worker.process.pid)
        before = process.num_fds()
        with ExitStack() as stack:
            for protocol, first in NOISE:
                port = worker.http_port if protocol == "http" else worker.port
                await asyncio.to_thread(connect, stack, port, 20, first)
            await serves(worker)
        await until(lambda: process.num_fds() <= before + 1)
        worker.process.terminate()
        assert await worker.end() == 0
        assert [event for event in worker.log if event["level"] != "info"] == []
