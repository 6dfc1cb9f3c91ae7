"""Waiting for reads without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.ring.transport import PendingRead, Transport

QUICK_TURNS = 64
SLOW_TURN = 0.001  # seconds


async def arrive(transport: Transport, reads: Sequence[PendingRead]) -> None:
    """Return once ``reads`` are done, letting other coroutines run meanwhile. Raises TransportLostError.

    A read over a good link is back within a few turns of the event loop; when it is not, turns with a rest between
    leave the CPU to others until the link answers or is given up.
    """
    turns = 0
    while not all(read.done for read in reads):
        transport.progress()
        await asyncio.sleep(0 if turns < QUICK_TURNS else SLOW_TURN)
        turns += 1
