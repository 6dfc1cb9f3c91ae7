"""One process of the load generator: sends its share of the requests at their times, whatever becomes of them."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from services.cli.bench.client import Client
from services.cli.bench.kinds import Protocol
from services.cli.bench.outcome import Outcome
from services.cli.bench.target import Target
from services.cli.bench.workload import Request

LOOK_SECONDS = 0.01  # between two looks at how late the event loop is


@dataclass(frozen=True, slots=True)
class Share:
    """What one process has to report of a load."""

    outcomes: list[Outcome]
    loop_delays: list[float]  # seconds that the event loop was late, looked at every LOOK_SECONDS
    cpu_seconds: float
    wall_seconds: float


def work(connection: Connection, target: Target) -> None:
    """The process: for each list of requests it says when it is ready, is told when to begin, and sends a Share."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    uvloop.run(_serve(connection, target))


async def _serve(connection: Connection, target: Target) -> None:
    client = _open(target)
    try:
        while True:
            requests: Sequence[Request] = await asyncio.to_thread(connection.recv)
            prepared = [(request.at, client.prepare(request)) for request in requests]
            gc.collect()
            gc.freeze()
            connection.send(None)
            connection.send(await run_load(client, prepared, await asyncio.to_thread(connection.recv)))
    except (EOFError, ConnectionError):  # the parent has ended
        pass
    finally:
        await client.close()


def _open(target: Target) -> Client:
    """Imports what the protocol needs."""
    if target.protocol is Protocol.GRPC:
        from services.cli.bench.grpc_client import GrpcClient  # noqa: PLC0415

        return GrpcClient(target)
    from services.cli.bench.openai_client import OpenAiClient  # noqa: PLC0415

    return OpenAiClient(target)


async def run_load(client: Client, prepared: Sequence[tuple[float, object]], begins: float) -> Share:
    """Open loop: a task for each request, made at its time; then wait for all of them."""
    cpu, began = time.process_time(), time.monotonic()
    delays: list[float] = []
    watching = asyncio.create_task(_watch_loop(delays))
    outcomes, tasks = [], []
    for at, message in prepared:
        outcome = Outcome(begins + at)
        while (wait := outcome.scheduled - time.monotonic()) > 0:  # noqa: ASYNC110 - timers may be a bit early
            await asyncio.sleep(wait)
        outcomes.append(outcome)
        tasks.append(asyncio.create_task(client.ask(message, outcome)))
    await asyncio.gather(*tasks)
    watching.cancel()
    return Share(outcomes, delays, time.process_time() - cpu, time.monotonic() - began)


async def _watch_loop(delays: list[float]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(LOOK_SECONDS)
        delays.append(max(0.0, time.monotonic() - before - LOOK_SECONDS))
