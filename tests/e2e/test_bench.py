"""``blink bench`` on the whole product, by gRPC and by HTTP: what it reports is what the server counted."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from services.cli.bench.report import Report
from tests.cli.run_blink import blink
from tests.dpu_gateway.metrics.scraped import Scraped
from tests.e2e.conftest import Launch

PROMPT, OUTPUT = 20, 6


@pytest.mark.parametrize("api", ["grpc", "completions", "chat"])
def test_a_small_load_is_answered_whole_and_counted_as_the_server_counts_it(
    launch: Launch, tmp_path: Path, api: str
) -> None:
    product = launch()
    openai = ["--openai", f"{product.http}/v1", "--api", api, "--vocabulary", "200"]
    target = ["--address", product.address] if api == "grpc" else openai
    lengths = ["--prompt-tokens", str(PROMPT), "--output-tokens", str(OUTPUT)]
    load = ["--rate", "20", "--seconds", "1", "--repeats", "2", "--warm-up", "0", "--processes", "1"]
    whose = ["--pid", str(product.process.pid), "--output", str(tmp_path)]
    done = blink("bench", *target, *lengths, *load, *whose, "--slo-ttft", "60000")
    assert done.returncode == 0, done.stderr
    (point,) = Report.model_validate_json((tmp_path / "bench.json").read_text()).points
    seen = Scraped(httpx2.get(f"{product.http}/metrics").text)
    assert point.failed == {}
    assert point.output_tokens == OUTPUT * point.requests == seen.value("blink_generation_tokens_total")
    assert point.prompt_tokens == seen.value("blink_prompt_tokens_total")
    if api != "chat":
        assert point.prompt_tokens == PROMPT * point.requests
    assert point.ttft_ms is not None
    assert point.ttft_ms.samples == point.requests
    assert point.tpot_ms is not None
    assert 0 <= point.tpot_ms.p50.mean <= point.tpot_ms.p999.mean  # 0 for tokens that came all together
    assert point.slo_share is not None
    assert point.slo_share.mean == 1
    assert point.host_cpu_us_per_token is not None
    assert point.host_cpu_us_per_token.mean > 0
    assert product.stop() == 0
    assert product.left_behind() == []
