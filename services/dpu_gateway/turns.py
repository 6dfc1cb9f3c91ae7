"""Wakes many streams a few at a time, so that whatever else the event loop has to do comes between."""

from __future__ import annotations

import asyncio
from collections import deque

from services.dpu_gateway.streams import Stream

STREAMS_PER_TURN = 4


class Turns:
    """A step gives every running stream a token, and sending one takes some 100 µs: all of them at once would hold up
    a request that arrives meanwhile, the first token of another, or a scrape, for milliseconds."""

    def __init__(self) -> None:
        self._due: deque[Stream] = deque()

    def add(self, stream: Stream) -> None:
        """Wake it in its turn, after those that were added before. Call it in the event loop."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._take)
        self._due.append(stream)

    def _take(self) -> None:
        for _ in range(min(STREAMS_PER_TURN, len(self._due))):
            stream = self._due.popleft()
            if stream.unsent:  # else something else woke it, and it has sent all
                stream.wake()
        if self._due:
            asyncio.get_running_loop().call_soon(self._take)  # after one look at what came in meanwhile
