from __future__ import annotations

from services.ring.schema import ENGINE_COUNTERS, LANE_STATUS
from tests.dpu_gateway.harness import MODEL, collect, gateway, max_tokens, text_request, until
from tests.dpu_gateway.http.clients import http_client
from tests.dpu_gateway.metrics.scraped import scrape
from tests.support.stand_in_engine import Behaviour


async def test_engine_figures_are_those_of_the_rings_header() -> None:
    async with gateway(Behaviour(tokens_per_second=20)) as system, http_client(system) as client:
        calls = [system.inference().Generate(text_request()) for _ in range(3)]
        for call in calls:
            await call.read()
            await call.read()
        seen = await scrape(client)
        assert seen.value("blink_num_requests_running", model_name=MODEL) == 3
        assert seen.value("blink_num_requests_waiting", model_name=MODEL) == 0
        assert seen.value("blink_kv_cache_usage_perc") == 3 / 16
        assert seen.value("blink_kv_cache_pages") == 16
        assert seen.value("blink_generation_tokens_total") >= 3
        assert seen.value("blink_engine_steps_total") > 0
        assert seen.value("blink_engine_heartbeat_age_seconds") < 1
        assert seen.value("blink_engine_state", state="ready") == 1
        assert seen.value("blink_engine_state") == 1
        assert seen.value("blink_lane_attached", lane="0") == 1
        assert seen.value("blink_lane_attached", lane="1") == 0
        assert seen.value("blink_lane_requests_running", lane="0") == 3
        assert seen.value("blink_lane_slots") == 8
        for call in calls:
            call.cancel()


async def test_every_counter_that_the_engine_keeps_is_exposed() -> None:
    """A field that the schema gains must not be forgotten here: all are set, then looked for."""
    async with gateway() as system, http_client(system) as client:
        await collect(system.inference().Generate(text_request(stop=max_tokens(3))))
        system.behaviour.heartbeat_frozen = True  # it writes no more
        counters = system.engine._counters
        for index, field in enumerate(ENGINE_COUNTERS.fields):
            counters[field.name] = 1_000_001 + index
        values = {sample.value for family in (await scrape(client)).families.values() for sample in family.samples}
        exposed = {value * factor for value in values for factor in (1, 1e6)}
        hidden = {"kv_pages_free"}  # as the share in use
        for index, field in enumerate(ENGINE_COUNTERS.fields):
            assert field.name in hidden or round(1_000_001 + index) in {round(value) for value in exposed}, field.name
        assert {field.name for field in LANE_STATUS.fields} == {
            *("generated_tokens", "phase", "running", "waiting", "rejected", "log_backlog", "reserved"),
        }


async def test_a_dead_engine_is_unreachable_and_leaves_the_gateways_figures() -> None:
    async with gateway() as system, http_client(system) as client:
        await collect(system.inference().Generate(text_request(stop=max_tokens(3))))
        await system.kill_engine()
        await until(lambda: system.workers[0].link.session is None)
        seen = await scrape(client)
        assert seen.value("blink_engine_state", state="unreachable") == 1
        assert seen.value("blink_engine_state") == 1
        assert "blink_engine_steps_total" not in seen.names
        assert seen.value("blink_request_success_total") == 1


async def test_openmetrics_is_spoken_to_those_who_ask_for_it() -> None:
    async with gateway() as system, http_client(system) as client:
        response = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert response.headers["content-type"].startswith("application/openmetrics-text")
        assert response.text.endswith("# EOF\n")
