"""Lines are, byte for byte, what prometheus_client itself makes of the same families."""

from __future__ import annotations

import math

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from services.dpu_gateway.metrics.lines import Lines

HARD_NAMES = ("", "two words", 'quoted "x"', "back\\slash", "new\nline", "ünïcode", "{}", "a 1.0")


def families(scale: float) -> list[Metric]:
    gauge = GaugeMetricFamily("blink_gauge", 'A "gauge" \\ of\nlines.', labels=["model_name", "reason"])
    counter = CounterMetricFamily("blink_counter", "A counter.", labels=["model_name"])
    histogram = HistogramMetricFamily("blink_seconds", "A histogram.", labels=["model_name"])
    for number, name in enumerate(HARD_NAMES):
        gauge.add_metric([name, "x"], scale * number)
        counter.add_metric([name], scale * 1e12 * number)
        histogram.add_metric([name], [("0.1", scale), ("2.5", 2 * scale), ("+Inf", 3 * scale)], sum_value=scale / 3)
    return [gauge, counter, histogram, GaugeMetricFamily("blink_single", "No labels.", -scale)]


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_every_scrape_is_as_the_library_would_write_it(accept: str) -> None:
    encode, _ = choose_encoder(accept)
    lines = Lines(encode)
    for scale in (0.0, 1.0, 1 / 7, 1e300, math.inf, math.nan):
        wanted = families(scale)

        class Families:
            def collect(self, wanted: list[Metric] = wanted) -> list[Metric]:
                return wanted

        assert b"".join([*map(lines.of, wanted), lines.end]) == encode(Families())


def test_a_series_that_comes_later_has_its_line() -> None:
    lines = Lines(choose_encoder("")[0])
    counter = CounterMetricFamily("blink_counter", "A counter.", labels=["reason"])
    counter.add_metric(["first"], 1)
    lines.of(counter)
    counter.add_metric(["second"], 2)
    assert lines.of(counter).endswith(b'{reason="first"} 1.0\nblink_counter_total{reason="second"} 2.0\n')
