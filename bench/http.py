"""What OpenAI's HTTP API adds to a first token over gRPC: the two asked in turns, one request at a time.

    python -m bench.http [--requests 400]

The stand-in engine owns the ring and answers at once. The clients are a gRPC stub that is given text, and a socket that
is read up to the first token's event: what grpc-python costs its caller beyond a socket is in gRPC's numbers. Each asks
for a chat, so both render the template. Half of the requests are over when the medians are taken, so warm-up and a busy
machine weigh on both alike.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack

import grpc
import numpy as np
import uvloop
from blink.v1 import inference_pb2_grpc
from rich.console import Console
from rich.table import Table

from bench.first_tokens import in_turns
from bench.gateway import granted_ring, process
from tests.dpu_gateway.harness import MODEL
from tests.support.stand_in_engine import FINGERPRINT


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=400, help="by each protocol")
    count = parser.parse_args().requests
    async with granted_ring() as (directory, ring):
        api, http = f"unix:{directory / 'api'}", directory / "http"
        flags = [f"--listen={api}", f"--http-listen=unix:{http}", f"--bootstrap=unix:{directory / 'bootstrap'}"]
        async with AsyncExitStack() as stack:
            engine_flags = ("--slots=64", f"--fingerprint={FINGERPRINT.hex()}")
            await stack.enter_async_context(
                process("tests.support.stand_in_engine", str(ring), *engine_flags, ready="READY")
            )
            await stack.enter_async_context(
                process("services.dpu_gateway", *flags, ready='"attached"', BLINK_RUNTIME_DIR=str(directory))
            )
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(api))
            stub = inference_pb2_grpc.InferenceStub(channel)
            reader, writer = await asyncio.open_unix_connection(str(http))
            times = await in_turns(stub, reader, writer, MODEL, count)
            writer.close()
    table = Table("first token after, ms", "p10", "p50", "p90")
    by_protocol = {"gRPC": times[:, 0], "HTTP": times[:, 1], "HTTP less gRPC, in pairs": times[:, 1] - times[:, 0]}
    for name, row in by_protocol.items():
        table.add_row(name, *(f"{value * 1e3:.2f}" for value in np.percentile(row, (10, 50, 90))))
    Console(width=100).print(table)


if __name__ == "__main__":
    uvloop.run(main())
