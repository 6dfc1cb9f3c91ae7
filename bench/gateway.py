"""What a gateway worker costs: CPU a token, tokens a second, time to first token, at 1, 32 and 256 streams.

    python -m bench.gateway [--seconds 5] [--streams 1 32 256] [--rates 0 80]

Four processes: the stand-in engine (owns the ring), the gateway worker under test, the load generator, and this one,
which grants the lane and is idle. Rate 0 lets the stand-in give tokens at once, one a step and stream; another rate
paces every stream, as an engine does, and streams begin evenly spread over one request's time. Measured is the time
in which all streams are open. CPU times are the kernel's accounts of the processes; time to first token is seen by the
client, less the stand-in's own interval.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import psutil
import uvloop
from blink.v1 import bootstrap_pb2, bootstrap_pb2_grpc, inference_pb2, inference_pb2_grpc
from rich.console import Console
from rich.table import Table

from services.ring.schema import ABI_VERSION, LAYOUT_HASH
from tests.dpu_gateway.harness import model_card
from tests.support.stand_in_engine import FINGERPRINT

PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
MAX_TOKENS = 256
SLOTS = 512


class Granting(bootstrap_pb2_grpc.BootstrapServicer):
    """Grants the stand-in's lanes, each gateway one."""

    def __init__(self, ring: Path) -> None:
        self._ring = ring
        self._lanes: dict[str, int] = {}  # by the gateway's name

    async def Attach(  # noqa: N802
        self,
        request: bootstrap_pb2.AttachRequest,
        context: grpc.aio.ServicerContext[bootstrap_pb2.AttachRequest, bootstrap_pb2.AttachResponse],
    ) -> bootstrap_pb2.AttachResponse:
        return bootstrap_pb2.AttachResponse(
            lane=self._lanes.setdefault(request.gateway_id, len(self._lanes)),
            gateway_epoch=time.time_ns(),
            engine_epoch=engine_epoch(self._ring),
            shm=bootstrap_pb2.ShmDescriptor(path=str(self._ring)),
            model=model_card(),
            lease_timeout_ms=5000,
            abi_version=ABI_VERSION,
            layout_hash=LAYOUT_HASH,
        )


def engine_epoch(ring: Path) -> int:
    from services.ring.schema import ENGINE_STATUS, header_offset  # noqa: PLC0415

    with ring.open("rb") as file:
        file.seek(header_offset(ENGINE_STATUS) + ENGINE_STATUS.offset_of("epoch"))
        return int.from_bytes(file.read(8), "little")


async def generate_load(address: str, streams: int, seconds: float, spread: float) -> None:
    """Keep ``streams`` requests open for a while, the first ones begun over ``spread`` seconds; print what was seen."""
    first_token: list[float] = []
    gaps: list[float] = []
    tokens = chunks = 0
    request = inference_pb2.GenerateRequest(text=PROMPT, stop=inference_pb2.StopConditions(max_tokens=MAX_TOKENS))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        end = time.perf_counter() + spread + seconds

        accounts: list[float] = []

        async def read_accounts() -> None:
            """CPU time of this process when the measured time begins and ends; the parent reads the others'."""
            for moment in (begun_all, end):
                await asyncio.sleep(max(0.0, moment - time.perf_counter()))
                print("MARK", flush=True)
                accounts.append(time.process_time())

        async def one_stream(number: int) -> None:
            nonlocal tokens, chunks
            await asyncio.sleep(spread * number / streams)
            while time.perf_counter() < end:
                begun = last = time.perf_counter()
                received = 0
                async for event in stub.Generate(request):
                    if event.HasField("chunk"):
                        now = time.perf_counter()
                        if received:
                            gaps.append(now - last)
                        else:
                            first_token.append(now - begun)
                        last = now
                        received += len(event.chunk.token_ids)
                        if begun_all <= now <= end:  # while all streams are open
                            tokens += len(event.chunk.token_ids)
                            chunks += 1
                assert received == MAX_TOKENS

        begun_all = time.perf_counter() + spread
        await asyncio.gather(*(one_stream(number) for number in range(streams)), read_accounts())
    p50, p99 = (float(np.percentile(first_token, q)) for q in (50, 99))
    print(
        json.dumps(
            {
                "tokens": tokens,
                "chunks": chunks,
                "client_cpu": accounts[1] - accounts[0],
                "ttft_p50": p50,
                "ttft_p99": p99,
                "gap_p99": float(np.percentile(gaps, 99)) if gaps else 0.0,
            }
        )
    )


@asynccontextmanager
async def granted_ring() -> AsyncIterator[tuple[Path, Path]]:
    """A runtime directory, and where a stand-in's ring may lie; its lanes grants a bootstrap at
    ``unix:DIRECTORY/bootstrap``. All gone at the end."""
    directory = Path(tempfile.mkdtemp(prefix="blink-bench-"))
    ring = Path(f"/dev/shm/{directory.name}")
    bootstrap = grpc.aio.server()
    bootstrap_pb2_grpc.add_BootstrapServicer_to_server(Granting(ring), bootstrap)
    bootstrap.add_insecure_port(f"unix:{directory / 'bootstrap'}")
    await bootstrap.start()
    try:
        yield directory, ring
    finally:
        await bootstrap.stop(0)
        shutil.rmtree(directory)


@asynccontextmanager
async def process(
    *arguments: str, ready: str = "", python: str = sys.executable, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process of a module or a file, awaited until it prints a line with ``ready``, stopped at the end."""
    child = await asyncio.create_subprocess_exec(
        python,
        "-P",  # modules are those of the interpreter's checkout
        *([] if arguments[0].endswith(".py") else ["-m"]),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | environment,
    )
    assert child.stdout is not None
    try:
        while ready:
            line = (await child.stdout.readline()).decode()
            if not line:
                raise RuntimeError(f"{arguments[0]} ended before it said {ready}")
            if ready in line:
                break
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
            await child.communicate()


def cpu_seconds(child: asyncio.subprocess.Process) -> float:
    times = psutil.Process(child.pid).cpu_times()
    return float(times.user + times.system)


async def measure(rate: float, streams: int, seconds: float, flags: Sequence[str]) -> list[str]:
    """One row of the table."""
    async with granted_ring() as (directory, ring):
        engine_flags = [f"--slots={SLOTS}", "--burst=1", "--log-entries=65536", f"--fingerprint={FINGERPRINT.hex()}"]
        if rate:
            engine_flags.append(f"--tokens-per-second={rate}")
        address = f"unix:{directory / 'api'}"
        async with (
            process("tests.support.stand_in_engine", str(ring), *engine_flags, ready="READY") as engine,
            process(
                "services.dpu_gateway",
                *(f"--listen={address}", "--http-listen=off", f"--bootstrap=unix:{directory / 'bootstrap'}", *flags),
                ready='"attached"',
                BLINK_RUNTIME_DIR=str(directory),
            ) as gateway,
        ):
            spread = MAX_TOKENS / rate if rate else 0.0
            client_flags = ("--client", address, str(streams), str(seconds), str(spread))
            async with process("bench.gateway", *client_flags, ready="MARK") as client:
                assert client.stdout is not None
                before = cpu_seconds(gateway), cpu_seconds(engine)
                await client.stdout.readline()
                gateway_cpu, engine_cpu = cpu_seconds(gateway) - before[0], cpu_seconds(engine) - before[1]
                output, _ = await client.communicate()
    seen = json.loads(output.splitlines()[-1])
    tokens = seen["tokens"]
    paced = 1 / rate if rate else 0.0  # the stand-in gives the first token after one interval
    return [
        f"{rate:g}/s" if rate else "at once",
        str(streams),
        f"{tokens / seconds:,.0f}",
        f"{gateway_cpu / tokens * 1e6:.1f}",
        " / ".join(f"{cpu / seconds * 100:.0f}%" for cpu in (gateway_cpu, engine_cpu, seen["client_cpu"])),
        f"{tokens / seen['chunks']:.1f}",
        f"{(seen['ttft_p50'] - paced) * 1e3:.1f}",
        f"{(seen['ttft_p99'] - paced) * 1e3:.1f}",
        f"{seen['gap_p99'] * 1e3:.1f}",
    ]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--client", nargs=4, metavar=("ADDRESS", "STREAMS", "SECONDS", "SPREAD"), help=argparse.SUPPRESS
    )
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0, 80], help="tokens a second and stream; 0: at once"
    )
    parser.add_argument("flags", nargs="*", help="for the gateway, after --")
    options = parser.parse_args()
    if options.client:
        address, streams, seconds, spread = options.client
        await generate_load(address, int(streams), float(seconds), float(spread))
        return
    table = Table(
        *("pace", "streams", "tokens/s", "gateway CPU µs/token", "CPU gateway / engine / client"),
        *("tokens/chunk", "TTFT added p50 ms", "p99 ms", "chunk gap p99 ms"),
    )
    for rate in options.rates:
        for streams in options.streams:
            table.add_row(*await measure(rate, streams, options.seconds, options.flags))
    Console(width=150).print(table)


if __name__ == "__main__":
    uvloop.run(main())
