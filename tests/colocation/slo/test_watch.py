"""What a pool is told of metrics that can't be read, and that other pools have no part in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry, generate_latest

from services.colocation.decision.guard import Verdict, judge
from services.colocation.slo.watch import SloWatch
from services.dpu_gateway.metrics.gateway import GatewayMetrics
from tests.colocation.clusters import LIMITS


@pytest.fixture
async def gateway() -> AsyncIterator[str]:
    """Where a gateway answers that has served nothing so far."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="# TYPE blink_engine_state gauge\nblink_engine_state 1\n")

    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/metrics"))


@pytest.mark.parametrize(
    "url",
    [
        "http://gateway:99999/metrics",
        "http://gateway:http/metrics",
        "http://a..b/metrics",
        f"http://{'a' * 64}/metrics",
        "http://:80/metrics",
        "http://user@/metrics",
        "http://[::1/metrics",
        "http://xn--a/metrics",
    ],
)
async def test_an_address_that_is_none_is_told_to_its_pool_and_costs_the_others_nothing(url: str, gateway: str) -> None:
    guards = {"wrong": {"metricsURLs": [url]}, "right": {"metricsURLs": [gateway]}}
    watch = SloWatch(timeout=2)
    for _ in range(2):
        await watch.look(guards)
    assert url in watch.errors["wrong"]
    assert watch.readings["wrong"] is None
    assert set(watch.errors) == {"wrong"}
    assert watch.readings["right"] is not None


async def test_a_gateway_that_is_silent_hides_no_limit_that_the_others_pass() -> None:
    metrics, registry = GatewayMetrics(), CollectorRegistry()
    registry.register(metrics)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry))

    app = web.Application()
    app.router.add_get("/metrics", answer)
    watch = SloWatch(timeout=2)
    async with TestServer(app) as server, TestServer(web.Application()) as without_metrics:
        urls = [str(each.make_url("/metrics")) for each in (server, without_metrics)]
        for expected, seconds in ((Verdict.UNKNOWN, 0.001), (Verdict.UNKNOWN, 0.001), (Verdict.BROKEN, 5.0)):
            metrics.of_model("m").first_token.observe(seconds)
            await watch.look({"p": {"metricsURLs": urls}})
            assert "status 404" in watch.errors["p"]
            assert judge(LIMITS, watch.readings["p"]) is expected
        await watch.look({"p": {"metricsURLs": urls[1:]}})
        assert watch.readings["p"] is None
