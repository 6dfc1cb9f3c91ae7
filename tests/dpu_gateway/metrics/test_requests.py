from __future__ import annotations

import asyncio

import pytest
from blink.v1 import inference_pb2 as pb

from services.dpu_gateway.errors import Overload, OverloadedError
from services.dpu_gateway.metrics.gateway import GatewayMetrics, WeightedHistogram
from services.dpu_gateway.metrics.request import RequestMetrics
from tests.dpu_gateway.harness import MODEL, Gateway, collect, gateway, max_tokens, ring_info, text_request, until
from tests.dpu_gateway.http.clients import http_client, openai_client
from tests.dpu_gateway.metrics.scraped import Scraped, scrape
from tests.dpu_gateway.test_generate import says
from tests.support.stand_in_engine import Behaviour

ENDS = "blink_request_success_total"
REFUSED = "blink_requests_rejected_total"


async def look(system: Gateway) -> Scraped:
    async with http_client(system) as client:
        return await scrape(client)


async def test_a_request_leaves_its_times_and_lengths_whichever_protocol_it_came_by() -> None:
    async with gateway(Behaviour(tokens_per_second=500)) as system, openai_client(system) as client:
        await collect(system.inference().Generate(text_request(stop=max_tokens(20))))
        await client.completions.create(model=MODEL, prompt="The quick brown fox", max_tokens=20)
        seen = await look(system)
    for name in (
        *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds", "request_time_per_output_token_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
    ):
        assert seen.value(f"blink_{name}_count", model_name=MODEL) == 2, name
        assert seen.value(f"blink_{name}_bucket", model_name=MODEL, le="+Inf") == 2, name
    assert seen.value("blink_request_generation_tokens_sum") == 40
    assert seen.value("blink_request_prompt_tokens_sum") == 8
    assert seen.value("blink_inter_token_latency_seconds_count") == 2 * 19  # one for each token but the first
    latency, decode = (
        seen.value("blink_e2e_request_latency_seconds_sum"),
        seen.value("blink_request_decode_time_seconds_sum"),
    )
    first = seen.value("blink_time_to_first_token_seconds_sum")
    assert first + decode <= latency
    assert decode == pytest.approx(seen.value("blink_inter_token_latency_seconds_sum"))
    assert seen.value(ENDS, finished_reason="length", model_name=MODEL) == 2
    assert seen.value("blink_gateway_open_requests") == 0


async def test_ends_are_counted_by_their_reason() -> None:
    async with gateway(Behaviour(script=says("one two three"), tokens_per_second=100)) as system:
        ask = system.inference().Generate
        await collect(ask(text_request()))
        await collect(ask(text_request(stop=pb.StopConditions(strings=["two"]))))
        limited = text_request()
        limited.time_limit.FromMilliseconds(1)
        await collect(ask(limited))
        cancelled = ask(text_request())
        await cancelled.read()
        cancelled.cancel()
        aborted = asyncio.create_task(collect(ask(text_request(request_id="x"))))
        await until(lambda: bool(system.engine.lanes[0].live.any()))
        await system.inference().Abort(pb.AbortRequest(request_id="x"))
        await aborted
        await until(lambda: system.workers[0].generations.open_streams == 0)
        seen = await look(system)
        assert {
            reason: seen.value(ENDS, finished_reason=reason) for reason in ("stop", "time_limit", "abort", "error")
        } == {"stop": 2, "time_limit": 1, "abort": 2, "error": 0}
        lost = asyncio.create_task(collect(ask(text_request())))
        await until(lambda: bool(system.engine.lanes[0].live.any()))
        await system.kill_engine()
        await lost
        assert (await look(system)).value(ENDS, finished_reason="error") == 1


async def test_refusals_are_counted_by_their_cause_and_are_no_ends() -> None:
    behaviour = Behaviour(tokens_per_second=20, max_requests=1)
    async with gateway(behaviour, ring_info(slots_per_lane=2)) as system:
        ask = system.inference().Generate
        running = asyncio.create_task(collect(ask(text_request())))
        await until(lambda: bool(system.engine.lanes[0].live.any()))
        await collect(ask(text_request()))  # the engine's queue is full
        await collect(ask(text_request(model="other")))
        await collect(ask(text_request("")))
        system.workers[0].generations.draining = True
        await collect(ask(text_request()))
        seen = await look(system)
        assert {reason: seen.value(REFUSED, reason=reason) for reason in _reasons(seen)} == {
            "queue_full": 1,
            "not_found": 1,
            "invalid_argument": 1,
            "unavailable": 1,
        }
        assert seen.value(ENDS) == 0
        assert seen.value("blink_gateway_open_requests") == 1
        running.cancel()


def _reasons(seen: Scraped) -> set[str]:
    return {sample.labels["reason"] for sample in seen.families["blink_requests_rejected"].samples}


def test_a_slow_reader_is_an_end_of_its_own() -> None:
    metrics = GatewayMetrics()
    request = RequestMetrics(metrics)
    request.submitted(MODEL, 3)
    request.accepted()
    request.tokens(5, 0.0)
    request.failed(OverloadedError(Overload.SLOW_READER, "too slow", 1.0))
    request.close()
    counters = {
        sample.labels["finished_reason"]: sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == ENDS
    }
    assert counters["slow_reader"] == 1
    assert sum(counters.values()) == 1


def test_several_observations_at_once_are_the_same_as_one_by_one() -> None:
    bounds = (1.0, 2.0, 4.0)
    one, many = (WeightedHistogram(f"h{index}", "", registry=None, buckets=bounds) for index in range(2))
    for value, count in ((0.0, 2), (1.0, 3), (1.5, 1), (4.0, 4), (9.0, 5)):
        many.observe_many(value, count)
        for _ in range(count):
            one.observe(value)

    def samples(histogram: WeightedHistogram) -> list[tuple[str, dict[str, str], float]]:
        (family,) = histogram.collect()
        return [(each.name[2:], each.labels, each.value) for each in family.samples if "created" not in each.name]

    assert samples(one) == samples(many)
