"""Waiting for the transport without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.ring.transport import PendingRead, Transport

QUICK_TURNS = 64
SLOW_TURN = 0.001  # seconds


async def arrive(transport: Transport, reads: Sequence[PendingRead]) -> None:
    """Return once ``reads`` are done, letting other coroutines run meanwhile. Raises TransportLostError.

    A read over a good link is back within a few turns of the event loop; when it is not, turns with a rest between
    leave the CPU to others until the link answers or is given up.
    """
    await _until(lambda: all(read.done for read in reads), transport)


async def room(transport: Transport) -> None:
    """Return once the transport takes writes without waiting for earlier ones. Raises TransportLostError."""
    await _until(lambda: not transport.busy, transport)


async def _until(true: Callable[[], bool], transport: Transport) -> None:
    turns = 0
    while not true():
        transport.progress()
        await asyncio.sleep(0 if turns < QUICK_TURNS else SLOW_TURN)
        turns += 1
