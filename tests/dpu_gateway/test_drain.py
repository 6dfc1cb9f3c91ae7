"""Whole worker processes: start, sharing a port, SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from blink.v1 import inference_pb2 as pb
from blink.v1 import inference_pb2_grpc

from tests.dpu_gateway.harness import LEASE_TIMEOUT_MS, Gateway, collect, gateway, max_tokens, text_request, until
from tests.support.stand_in_engine import Behaviour

SECRET = "a prompt that no log may show"


@dataclass
class WorkerProcess:
    process: asyncio.subprocess.Process
    port: int
    http_port: int
    health_port: int
    log: list[dict[str, object]]

    async def event(self, name: str) -> dict[str, object]:
        """Read the log up to an event."""
        assert self.process.stderr is not None
        async with asyncio.timeout(30):
            while line := await self.process.stderr.readline():
                self.log.append(json.loads(line))
                if self.log[-1]["event"] == name:
                    return self.log[-1]
        raise AssertionError(f"no {name} in {self.log}")

    async def end(self) -> int:
        assert self.process.stderr is not None
        async with asyncio.timeout(30):
            rest = await self.process.stderr.read()
            self.log += [json.loads(line) for line in rest.splitlines()]
            return await self.process.wait()


@asynccontextmanager
async def worker_process(
    system: Gateway, *flags: str, port: int = 0, http_port: int = 0
) -> AsyncIterator[WorkerProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.dpu_gateway", f"--listen=127.0.0.1:{port}", f"--http-listen=127.0.0.1:{http_port}"),
        f"--bootstrap=unix:{system.directory / 'bootstrap.sock'}",
        *flags,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"BLINK_RUNTIME_DIR": str(system.directory)},
    )
    worker = WorkerProcess(process, 0, 0, 0, [])
    try:
        listening = await worker.event("listening")
        for name in ("port", "http_port", "health_port"):
            setattr(worker, name, int(str(listening[name])))
        await worker.event("attached")
        yield worker
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_sigterm_lets_open_streams_finish_refuses_new_ones_and_exits_0() -> None:
    async with (
        gateway(Behaviour(tokens_per_second=40), workers=0) as system,
        worker_process(system, "--gateway-id=w") as worker,
        grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        reading = asyncio.create_task(collect(stub.Generate(text_request(SECRET, stop=max_tokens(60)))))
        await until(lambda: bool(system.engine.lanes[0].live.any()))
        worker.process.send_signal(signal.SIGTERM)
        await worker.event("draining")
        refused = await collect(stub.Generate(text_request(SECRET)))
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        result = await reading
        assert len(result.ids) == 60
        assert result.finished.reason == pb.FINISH_REASON_LENGTH
        assert await worker.end() == 0
        assert worker.log[0]["event"] == "settings"
        assert worker.log[0]["gateway_id"] == "w"
        assert {event["level"] for event in worker.log} == {"info"}  # a clean stop is nothing to warn of
        assert SECRET not in json.dumps(worker.log)
        assert not (system.directory / "gateway-default-0.sock").exists()


async def test_streams_that_outlast_the_drain_limit_end_with_a_status() -> None:
    async with (
        gateway(Behaviour(tokens_per_second=5), workers=0) as system,
        worker_process(system, "--drain-limit=0.3") as worker,
        grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        reading = asyncio.create_task(collect(stub.Generate(text_request())))
        await until(lambda: bool(system.engine.lanes[0].live.any()))
        worker.process.send_signal(signal.SIGTERM)
        result = await reading
        assert (result.code, result.details) == (grpc.StatusCode.UNAVAILABLE, "the gateway stopped")
        assert await worker.end() == 0
        await until(lambda: not system.engine.lanes[0].live.any())  # the lane was given back


async def test_workers_share_one_port_and_take_over_from_one_that_is_killed() -> None:
    async with (
        gateway(Behaviour(lease_timeout=LEASE_TIMEOUT_MS / 1000), workers=0) as system,
        worker_process(system, "--worker=0") as first,
        worker_process(system, "--worker=1", port=first.port) as second,
    ):
        assert second.port == first.port

        async def ask() -> grpc.StatusCode:
            options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
            async with grpc.aio.insecure_channel(f"127.0.0.1:{first.port}", options=options) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                return (await collect(stub.Generate(text_request(stop=max_tokens(2))))).code

        assert {await ask() for _ in range(8)} == {grpc.StatusCode.OK}
        first.process.kill()
        await first.process.wait()
        assert {await ask() for _ in range(8)} == {grpc.StatusCode.OK}


@pytest.mark.parametrize("flag", ["--listen", "--health-listen"])
async def test_a_port_in_use_is_one_clear_line_and_a_non_zero_exit(flag: str) -> None:
    async with gateway(workers=0) as system:
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, flag == "--health-listen")  # as a worker's may be
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            others = [f"{each}=127.0.0.1:0" for each in ("--listen", "--http-listen") if each != flag]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "services.dpu_gateway", f"{flag}=127.0.0.1:{port}", *others),
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | {"BLINK_RUNTIME_DIR": str(system.directory)},
            )
            _, output = await process.communicate()
        last = json.loads(output.splitlines()[-1])
        assert process.returncode == 1
        assert last["event"] == "failed"
        assert f"cannot listen on 127.0.0.1:{port}" in last["error"]


@pytest.mark.parametrize("flags", [["--worker=999"], ["--no-such-flag"]])
async def test_bad_settings_end_the_process_with_code_2(flags: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.dpu_gateway", *flags, stderr=asyncio.subprocess.PIPE
    )
    await process.communicate()
    assert process.returncode == 2
