"""The answer to a scrape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import chain

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from services.dpu_gateway.link import EngineLink
from services.dpu_gateway.metrics.engine import EngineFigures
from services.dpu_gateway.metrics.lines import Lines

Collect = Callable[[], Iterable[Metric]]
SLICE = 0.0005  # seconds for which a scrape holds up the streams at once


class Exposition:
    """``gateway`` gives the workers' figures; the engine's come out of the ring."""

    def __init__(self, link: EngineLink, gateway: Collect) -> None:
        self._link = link
        self._gateway = gateway
        self._formats: dict[str, Lines] = {}  # by content type

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """Body and content type in the format that the scraper ``accept``s.

        Formatted in the event loop, a few families at a time: a thread would take the interpreter lock from the loop
        for longer than that, each time that a stream's write lets go of it.
        """
        figures = await EngineFigures.take(self._link.session)
        encode, content_type = choose_encoder(accept)
        lines = self._formats.get(content_type)
        if lines is None:
            lines = self._formats[content_type] = Lines(encode)
        parts = []
        until = time.perf_counter() + SLICE
        for metric in chain(figures.collect(), self._gateway()):
            parts.append(lines.of(metric))
            if time.perf_counter() >= until:
                await asyncio.sleep(0)
                until = time.perf_counter() + SLICE
        return b"".join([*parts, lines.end]), content_type
