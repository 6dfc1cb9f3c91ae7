"""The answer to a scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from services.dpu_gateway.link import EngineLink
from services.dpu_gateway.metrics.engine import EngineFigures

Collect = Callable[[], Iterable[Metric]]


class _Families:
    """Metric families as prometheus_client's encoders take them."""

    def __init__(self, *sources: Collect) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            yield from source()


class Exposition:
    """``gateway`` gives the workers' figures; the engine's come out of the ring."""

    def __init__(self, link: EngineLink, gateway: Collect) -> None:
        self._link = link
        self._gateway = gateway

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """Body and content type in the format that the scraper ``accept``s. Formatted off the event loop."""
        figures = await EngineFigures.take(self._link.session)
        encode, content_type = choose_encoder(accept)
        return await asyncio.to_thread(encode, _Families(figures.collect, self._gateway)), content_type
