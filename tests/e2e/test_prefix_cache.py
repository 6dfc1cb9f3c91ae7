"""The prefix cache through the whole product with a real model: usage reports it, answers don't show it."""

from __future__ import annotations

import httpx2
import pytest
from blink.v1 import inference_pb2
from openai import OpenAI

from tests.dpu_gateway.metrics.scraped import Scraped
from tests.e2e.conftest import Launch
from tests.e2e.product import LIMIT, Stream, request

MODEL = "smollm2-135m-instruct"
PROMPT = "The capital of France is Paris, that of Italy is Rome. " * 8 + "The capital of Spain is"

pytestmark = pytest.mark.model


def answer(stream: Stream) -> list[tuple[int, inference_pb2.TokenLogprobs]]:
    """Ids and log-probabilities."""
    chunks = [event.chunk for event in stream.join().events]
    return [pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)]


def usage(stream: Stream) -> inference_pb2.Usage:
    return stream.join().events[-1].finished.usage


def test_the_second_time_a_prompt_is_not_computed_and_the_answer_is_the_same(launch: Launch) -> None:
    product = launch("--workers", "1", model=MODEL)
    with product.channel() as channel:
        asked: list[dict[str, object]] = [
            {},
            {},
            {"cache_salt": "mine"},
            {"cache_salt": "mine"},
            {"no_prefix_cache": True},
        ]
        streams = [Stream(channel, request(PROMPT, 16, logprobs=3, **fields)).join() for fields in asked]
    prompt = usage(streams[0]).prompt_tokens
    pages = (prompt - 2) // 16 * 16
    assert pages >= 64
    assert [usage(stream).cached_tokens for stream in streams] == [0, pages, 0, pages, 0]
    assert answer(streams[0])
    assert all(answer(stream) == answer(streams[0]) for stream in streams)

    with OpenAI(api_key="none", base_url=f"{product.http}/v1", max_retries=0, timeout=LIMIT) as client:
        whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0)
        theirs = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, extra_body={"cache_salt": "theirs"}
        )
    for completion, cached in ((whole, pages), (theirs, 0)):
        assert completion.usage is not None
        assert completion.usage.prompt_tokens_details is not None
        assert completion.usage.prompt_tokens_details.cached_tokens == cached
    seen = Scraped(httpx2.get(f"{product.http}/metrics").text)
    assert seen.value("blink_prefix_cache_hits_total") == 3 * pages
    assert seen.value("blink_prefix_cache_queries_total") == 6 * prompt
