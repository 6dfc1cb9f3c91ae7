"""What a scrape costs, and what it does to streams: GET /metrics at 0 and 256 streams of 80 tokens/s.

    python -m bench.metrics [--seconds 10] [--streams 0 256] [--python .venv/bin/python OTHER/.venv/bin/python]

The stand-in engine owns the ring; streams come over gRPC from a process of their own. Each row is measured twice, with
scrapes ten times a second and without, so that the last columns show what they do to the time between two chunks.
The times of a scrape are its client's, who competes for the CPUs with all the others; the gateway's CPU time, which the
row without streams gives, is what a scrape takes from them. ``--python`` names interpreters of checkouts whose gateways
are measured in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from bench.gateway import MAX_TOKENS, SLOTS, cpu_seconds, granted_ring, process
from tests.support.stand_in_engine import FINGERPRINT

RATE = 80.0
INTERVAL = 0.1
WARM = 3


async def scrapes(socket: Path, until: float) -> tuple[list[float], int]:
    """Seconds of each scrape, and the size of the last one's body in bytes."""
    times = []
    size = 0
    async with httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(socket)), base_url="http://x") as client:
        for _ in range(WARM):
            await client.get("/metrics")
        while time.perf_counter() < until:
            begun = time.perf_counter()
            size = len((await client.get("/metrics")).content)
            times.append(time.perf_counter() - begun)
            await asyncio.sleep(INTERVAL)
    return times, size


@dataclass
class Measured:
    times: list[float]  # seconds of each scrape
    body_bytes: int
    gap: float  # between two chunks of a stream, 99th percentile, in seconds
    cpu: float  # seconds of the gateway


async def measure(python: str, streams: int, seconds: float, scraped: bool) -> Measured:
    async with granted_ring() as (directory, ring):
        api, http = f"unix:{directory / 'api'}", directory / "http"
        engine_flags = [f"--slots={SLOTS}", "--burst=1", "--log-entries=65536", f"--fingerprint={FINGERPRINT.hex()}"]
        engine_flags.append(f"--tokens-per-second={RATE}")
        gateway_flags = [f"--listen={api}", f"--http-listen=unix:{http}", f"--bootstrap=unix:{directory / 'bootstrap'}"]
        times: list[float] = []
        size, gap = 0, 0.0
        async with AsyncExitStack() as stack:
            engine = process("tests.support.stand_in_engine", str(ring), *engine_flags, ready="READY")
            await stack.enter_async_context(engine)
            gateway = process(
                *("services.dpu_gateway", *gateway_flags),
                ready='"attached"',
                python=python,
                BLINK_RUNTIME_DIR=str(directory),
            )
            worker = await stack.enter_async_context(gateway)
            spread = MAX_TOKENS / RATE if streams else 0.0
            end = time.perf_counter() + spread + seconds
            if streams:
                flags = ("--client", api, str(streams), str(seconds), str(spread))
                client = await stack.enter_async_context(process("bench.gateway", *flags, ready="MARK"))
                end = time.perf_counter() + seconds
            cpu = cpu_seconds(worker)
            if scraped:
                times, size = await scrapes(http, end)
            elif not streams:
                await asyncio.sleep(seconds)
            cpu = cpu_seconds(worker) - cpu
            if streams:
                output, _ = await client.communicate()
                gap = float(json.loads(output.splitlines()[-1])["gap_p99"])
    return Measured(times, size, gap, cpu)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--streams", type=int, nargs="+", default=[0, 256])
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters of gateways' checkouts")
    options = parser.parse_args()
    names = ("streams", "gateway", "scrapes", "p50 ms", "p99 ms", "CPU ms", "body KB", "chunk gap p99 ms")
    table = Table(*names, "without scrapes")
    for streams in options.streams:
        for number, python in enumerate(options.python):
            calm = await measure(python, streams, options.seconds, scraped=False)
            seen = await measure(python, streams, options.seconds, scraped=True)
            p50, p99 = np.percentile(seen.times, (50, 99)) * 1e3
            cpu = "" if streams else f"{(seen.cpu - calm.cpu) / len(seen.times) * 1e3:.2f}"
            times = (str(len(seen.times)), f"{p50:.2f}", f"{p99:.2f}", cpu)
            gaps = (f"{seen.gap * 1e3:.1f}", f"{calm.gap * 1e3:.1f}")
            table.add_row(str(streams), str(number), *times, f"{seen.body_bytes / 1000:.1f}", *gaps)
    Console(width=120).print(table)


if __name__ == "__main__":
    uvloop.run(main())
