from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from services.dpu_gateway.link import EngineLink
from services.dpu_gateway.metrics.exposition import SLICE, Exposition

NO_ENGINE = cast(EngineLink, SimpleNamespace(session=None))
FAMILIES = 12


def slow_families() -> Iterator[Metric]:
    for number in range(FAMILIES):
        until = time.perf_counter() + SLICE
        while time.perf_counter() < until:
            pass
        yield GaugeMetricFamily(f"blink_{number}", "A gauge.", number)


async def test_other_coroutines_run_while_a_scrape_is_formatted() -> None:
    rendering = asyncio.create_task(Exposition(NO_ENGINE, slow_families).render())
    rounds = 0
    while not rendering.done():
        await asyncio.sleep(0)
        rounds += 1
    assert rounds > FAMILIES


async def test_an_answer_in_slices_is_one_valid_answer_in_either_format() -> None:
    exposition = Exposition(NO_ENGINE, slow_families)
    for accept, parse in (("", parse_text), ("application/openmetrics-text; version=1.0.0", parse_openmetrics)):
        body, content_type = await exposition.render(accept)
        assert ("openmetrics" in content_type) == bool(accept)
        found = {family.name for family in parse(body.decode())}
        assert {f"blink_{number}" for number in range(FAMILIES)} <= found
        assert "blink_engine_state" in found
