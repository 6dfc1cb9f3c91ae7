"""Programs that speak OpenAI's API, and curl, against the whole product."""

from __future__ import annotations

import json
import subprocess

import httpx2
import pytest
from openai import OpenAI

from tests.dpu_gateway.metrics.scraped import Scraped
from tests.e2e.conftest import Launch
from tests.e2e.product import LIMIT, Product, Stream, request, until

MODEL = "smollm2-135m-instruct"
PROMPT = "The capital of France is"


def curl(*arguments: str) -> str:
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", str(LIMIT), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def openai(product: Product) -> OpenAI:
    return OpenAI(api_key="none", base_url=f"{product.http}/v1", max_retries=0, timeout=LIMIT)


@pytest.mark.model
def test_a_real_model_answers_the_same_over_http_and_grpc(launch: Launch) -> None:
    product = launch("--workers", "2", model=MODEL)
    with openai(product) as client, product.channel() as channel:
        expected = Stream(channel, request(PROMPT, 24)).join()
        completion = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
        )
        assert "Paris" in completion.choices[0].text
        assert completion.choices[0].text == expected.text
        chat = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(chat)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert "Paris" in text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 24
    seen = Scraped(httpx2.get(f"{product.http}/metrics").text)
    assert seen.value("blink_request_success_total", model_name=MODEL) == 3
    assert seen.value("blink_generation_tokens_total") == 24 + 24 + chunks[-1].usage.completion_tokens
    assert product.stop() == 0
    assert product.left_behind() == []


def test_curl_gets_a_stream_models_probes_and_metrics(launch: Launch) -> None:
    product = launch()
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "stream": True, "ignore_eos": True}
    data = ["--header", "Content-Type: application/json", "--data", json.dumps(body)]
    name = json.loads(curl(f"{product.http}/v1/models"))["data"][0]["id"]
    body["model"] = name
    data[-1] = json.dumps(body)
    events = curl("--no-buffer", f"{product.http}/v1/completions", *data).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert choices[-1]["finish_reason"] == "length"
    assert curl(f"{product.http}/health") == ""
    assert curl(f"{product.http}/ready") == ""
    assert 'blink_request_success_total{finished_reason="length"' in curl(f"{product.http}/metrics")
    assert product.stop() == 0


def test_a_stop_lets_open_http_answers_finish(launch: Launch) -> None:
    product = launch("--workers", "2")
    with openai(product) as client:
        name = client.models.list().data[0].id
        stream = client.completions.create(
            model=name, prompt="hello", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        product.process.terminate()
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert product.end() == 0
    assert product.left_behind() == []


def test_metrics_outlive_a_killed_worker_and_http_can_be_off(launch: Launch) -> None:
    product = launch("--workers", "2")
    with product.channel() as channel:
        Stream(channel, request("hello", 4)).join()

    def ended() -> float:
        try:
            return Scraped(httpx2.get(f"{product.http}/metrics").text).value("blink_request_success_total")
        except httpx2.TransportError:  # a worker that is starting
            return 0.0

    assert ended() == 1
    for worker in (0, 1):
        product.gateway(worker).kill()
        product.wait_for(f"gateway-{worker} is back")
    until(lambda: ended() == 1)
    assert product.stop() == 0
    silent = launch("--http", "off")
    assert silent.address
    assert silent.stop() == 0
    assert not [line for line in silent.lines if "OpenAI API" in line]
    assert silent.left_behind() == []
