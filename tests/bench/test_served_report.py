"""The report of bench.served: what it shows, and that nothing that went wrong passes for a measurement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.served_report import REFERENCES, Figures, Row, around, faults_of_streams, matrix
from bench.served_scrapes import Streamed, open_requests
from services.cli.bench.report import ClientHealth, Interference, Latency, Point, Value


def value(mean: float) -> Value:
    return Value(mean=mean, low=None, high=None)


def latency(p50: float, p99: float) -> Latency:
    return Latency(samples=9, mean=value(p50), p50=value(p50), p95=value(p99), p99=value(p99), p999=value(p99))


def row(load: float = 4.0, neighbours: int = 0, ttft: tuple[float, float] = (6.0, 11.0), **changes: Any) -> Row:
    beside = Interference(count=neighbours, cpus=[4], copy_gb_per_s=20, update_gb_per_s=10, walk_gb_per_s=2)
    health = ClientHealth(
        ok=True, lateness_p99_ms=0.5, lateness_max_ms=1, loop_delay_p99_ms=0.25, busy_max=0.5, processes=2
    )
    point = Point(
        load=load,
        repeats=1,
        requests=9,
        failed={},
        prompt_tokens=90,
        output_tokens=900,
        offered_requests_per_s=value(load),
        requests_per_s=value(load),
        output_tokens_per_s=value(1234.0),
        goodput_requests_per_s=None,
        slo_share=None,
        ttft_ms=latency(*ttft),
        tpot_ms=latency(4.0, 4.2),
        itl_ms=None,
        end_to_end_ms=None,
        host_cpu_us_per_token=value(0.5),
        gpu_joules_per_token=None,
        client=health,
        interference=beside if neighbours else None,
    )
    return Row(point.model_copy(update=changes), 900)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_matrix_is_in_order_of_load_and_sets_each_row_beside_what_is_to_be_reached() -> None:
    header, _, *lines = matrix([row(32.0), row(4.0, 48, ttft=(6.0, 22.0)), row(4.0)], REFERENCES)
    table = [dict(zip(cells(header), cells(line), strict=True)) for line in lines]
    assert [(line["offered req/s"], line["neighbours"]) for line in table] == [
        ("4", "none"),
        ("4", "48, 32 GB/s"),
        ("32", "none"),
    ]
    assert [line["reached"] for line in table] == ["yes", "no", "yes"]
    assert table[0]["TTFT p50 / p99, TPOT p99 ms"] == "6 / 11, 4.2"
    assert table[0]["to reach"] == "≤ 7 / 12, 4.3"
    assert [line["vLLM 0.26"] for line in table[:2]] == ["23.6 / 42.4, 5.42", "100 / 211, 21.8"]
    assert table[1]["TTFT, TPOT p99 over those without neighbours"] == "2.00, 1.00"


def test_thousands_are_written_out() -> None:
    assert str(REFERENCES[32.0].beside) == "242 / 3066, 82.8"


@pytest.mark.parametrize("over", ["ttft_p50", "ttft_p99", "tpot_p99"])
def test_one_figure_over_its_limit_is_not_reached(over: str) -> None:
    limit = Figures(7, 12, 4.3)
    assert limit.within(limit)
    assert not replace(limit, **{over: getattr(limit, over) + 0.1}).within(limit)


def test_a_rate_without_a_reference_and_a_row_without_answers_have_dashes() -> None:
    _, _, line = matrix([row(5.0, ttft_ms=None)], REFERENCES)
    assert cells(line)[4:9] == ["-"] * 5


def test_a_good_row_has_no_fault() -> None:
    assert list(row().faults()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"failed": {"UNAVAILABLE": 3}}, "4 req/s beside 48 neighbours: failed 3 UNAVAILABLE"),
        ({"output_tokens": 899}, "899 tokens came, 900 were asked for"),
        ({"client": row().point.client.model_copy(update={"ok": False})}, "the load generator was too slow"),
    ],
)
def test_what_went_wrong_is_a_fault_by_name(changes: dict[str, Any], words: str) -> None:
    (fault,) = row(4.0, 48, **changes).faults()
    assert words in fault


def test_streams_that_were_cut_short_or_never_scraped_are_faults() -> None:
    calm, scraped = Streamed([], 0.04, {"CANCELLED": 1}), Streamed([], 0.04, {})
    assert list(faults_of_streams(256, [calm, scraped])) == [
        "256 streams without scrapes: {'CANCELLED': 1}",
        "no scrape found 256 streams open",
    ]
    assert list(faults_of_streams(256, [replace(calm, failed={}), replace(scraped, scrapes=[0.003])])) == []


def test_what_lies_around_the_stream_is_shown_where_it_was_measured() -> None:
    runs = [Streamed([], 0.0412, {}), Streamed([0.004, 0.003, 0.009], 0.0425, {})]
    _, _, added, scrape, apart = around([-0.1, 0.2, 0.5], 256, runs)
    assert cells(added)[1:] == ["0.20 (-0.10, 0.50)", "0.3"]
    assert cells(scrape)[1:] == ["4.0 / 9.0 of 3", "5"]
    assert cells(apart)[1:] == ["42.5 / 41.2", "alike"]
    assert len(list(around([], 256, []))) == 2


def test_open_requests_are_summed_over_workers() -> None:
    figures = b'# TYPE blink_gateway_open_requests gauge\nblink_gateway_open_requests{worker="0"} 3.0\n'
    assert open_requests(figures + b'blink_gateway_open_requests{worker="1"} 4.0\nother 9\n') == 7
    with pytest.raises(ValueError, match="no blink_gateway_open_requests"):
        open_requests(b"other 9\n")
