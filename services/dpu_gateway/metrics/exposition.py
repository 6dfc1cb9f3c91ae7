"""The answer to a scrape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from services.dpu_gateway.link import EngineLink
from services.dpu_gateway.metrics.engine import EngineFigures

Collect = Callable[[], Iterable[Metric]]
SLICE = 0.0005  # seconds for which a scrape holds up the streams at once
END = b"# EOF\n"  # of an answer in OpenMetrics's format


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric family as prometheus_client's encoders take it."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.metric,)


class Exposition:
    """``gateway`` gives the workers' figures; the engine's come out of the ring."""

    def __init__(self, link: EngineLink, gateway: Collect) -> None:
        self._link = link
        self._gateway = gateway

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """Body and content type in the format that the scraper ``accept``s.

        Formatted in the event loop, a few families at a time: a thread would take the interpreter lock from the loop
        for longer than that, each time that a stream's write lets go of it.
        """
        figures = await EngineFigures.take(self._link.session)
        encode, content_type = choose_encoder(accept)
        parts, ended = [], False
        until = time.perf_counter() + SLICE
        for metric in chain(figures.collect(), self._gateway()):
            part = encode(_Family(metric))
            ended |= part.endswith(END)
            parts.append(part.removesuffix(END))
            if time.perf_counter() >= until:
                await asyncio.sleep(0)
                until = time.perf_counter() + SLICE
        return b"".join([*parts, END if ended else b""]), content_type
