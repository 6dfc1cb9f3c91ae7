"""P99 out of what gateways expose: against Prometheus's own rules, over restarts and newcomers."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.colocation.errors import ScrapeError
from services.colocation.slo.window import SlidingWindow, parse
from services.dpu_gateway.metrics.gateway import GatewayMetrics

INF = float("inf")
GATEWAY = ("http://gateway/metrics", "10.0.0.1")
OTHER = ("http://gateway/metrics", "10.0.0.2")


def exposed(metrics: GatewayMetrics) -> str:
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode()


def test_the_gateways_own_exposition_is_understood() -> None:
    metrics = GatewayMetrics()
    for model in ("a", "b"):
        metrics.of_model(model).first_token.observe(0.04)
        metrics.of_model(model).time_per_token.observe(0.006)
    seen = parse(exposed(metrics))
    assert seen.ttft[INF] == seen.tpot[INF] == 2  # of all models
    assert (seen.ttft[0.03], seen.ttft[0.05]) == (0, 2)


BUCKET = 'blink_time_to_first_token_seconds_bucket{le="%s"} %s\n'


@pytest.mark.parametrize(
    "text",
    ["", "<html>", "up 1\n", *(BUCKET % each for each in (("x", 1), ("1", "NaN"), ("1", "+Inf"), ("1", -1)))],
)
def test_what_is_no_gateways_answer_is_refused(text: str) -> None:
    with pytest.raises(ScrapeError):
        parse(text)


class Gateways:
    """Real metric objects that a window looks at."""

    def __init__(self, seconds: float = 60) -> None:
        self.window = SlidingWindow(seconds)
        self.metrics = {GATEWAY: GatewayMetrics()}
        self.clock = 0.0

    def serve(self, seconds: float, count: int = 100, at: tuple[str, str] = GATEWAY) -> None:
        for _ in range(count):
            self.metrics[at].of_model("m").first_token.observe(seconds)

    def look(self, after: float = 5) -> float | None:
        self.clock += after
        self.window.take(self.clock, {name: parse(exposed(each)) for name, each in self.metrics.items()})
        reading = self.window.reading()
        return None if reading is None else reading.ttft


def seen_once(gateways: Gateways) -> Gateways:
    gateways.serve(0.01)
    assert gateways.look() is None
    return gateways


def test_what_came_before_the_first_look_does_not_count() -> None:
    gateways = Gateways()
    gateways.serve(5.0)
    assert gateways.look() is None  # nothing to compare with
    gateways.serve(0.01)
    found = gateways.look()
    assert found is not None
    assert found <= 0.01


def test_it_forgets_what_is_older_than_the_window() -> None:
    gateways = seen_once(Gateways(seconds=30))
    gateways.serve(5.0)
    slow = gateways.look()
    assert slow is not None
    assert slow > 2.5
    for _ in range(5):
        assert gateways.look() == slow
    assert gateways.look() is None  # nothing was asked for 30 s


def test_one_slow_gateway_among_fast_ones_is_seen_and_so_is_a_newcomer() -> None:
    gateways = seen_once(Gateways())
    gateways.metrics[OTHER] = GatewayMetrics()
    gateways.serve(0.01)
    gateways.serve(5.0, at=OTHER)
    found = gateways.look()
    assert found is not None
    assert found > 2.5


def test_a_restarted_gateway_counts_from_nothing() -> None:
    gateways = seen_once(Gateways())
    gateways.metrics[GATEWAY] = GatewayMetrics()
    gateways.serve(5.0, count=10)
    found = gateways.look()
    assert found is not None
    assert found > 2.5


def test_after_it_was_told_to_forget_it_needs_two_looks_again() -> None:
    gateways = seen_once(Gateways())
    gateways.window.forget()
    assert gateways.look() is None


def test_what_one_counted_while_it_was_silent_is_not_of_now() -> None:
    gateways = seen_once(Gateways())
    gateways.serve(0.01)
    assert gateways.look() is not None
    gateways.metrics[OTHER] = GatewayMetrics()
    gateways.look()
    silent = gateways.metrics.pop(OTHER)
    gateways.window.take(gateways.clock + 5, {GATEWAY: parse(exposed(gateways.metrics[GATEWAY]))}, {OTHER})
    gateways.metrics[OTHER] = silent
    gateways.serve(5.0, at=OTHER)
    found = gateways.look()
    assert found is not None
    assert found <= 0.01
    gateways.serve(5.0, at=OTHER)
    found = gateways.look()
    assert found is not None
    assert found > 2.5
