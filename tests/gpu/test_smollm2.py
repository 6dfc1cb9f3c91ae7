"""SmolLM2-135M-Instruct on the GPU, through the ring: tokens equal transformers' wherever they are clear."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")
from services.gpu_engine.cuda.assemble import SchedulerPlace
from services.gpu_engine.cuda.driver import Device
from services.gpu_engine.engine import EngineLimits
from services.gpu_engine.models.checkpoint import Checkpoint
from tests.gpu.model_serving import Client, serving_model

pytestmark = pytest.mark.model
GOLDENS = json.loads((Path(__file__).parents[1] / "gpu_engine/cpu/goldens.json").read_text())["goldens"]
CLEAR_MARGIN = 0.5  # of float32 logits; bf16 products move them by less


def limits(*, prefix_cache: bool = False, **changes: int) -> EngineLimits:
    sizes = {"page_size": 16, "kv_pages": 2048, "max_running": 16, "max_batched_tokens": 256, "context": 2048}
    return EngineLimits(
        **(sizes | changes), prefix_cache=prefix_cache, share_decoded=False, max_waiting=64, lease_timeout_ms=10_000
    )


@pytest.fixture(scope="module")
def client(device: Device, smollm2: Checkpoint, scheduler: SchedulerPlace) -> Iterator[Client]:
    with serving_model(smollm2, limits(), scheduler=scheduler) as client:
        yield client


def agreed(tokens: list[int], golden: dict[str, list[float]]) -> int:
    """How many tokens agree before the first difference, which must be where float32 itself was near a tie."""
    for position, (token, expected) in enumerate(zip(tokens, golden["tokens"], strict=True)):
        if token != expected:
            assert golden["margins"][position] < CLEAR_MARGIN, (position, golden["margins"][position])
            return position
    return len(tokens)


def test_greedy_tokens_of_a_batch_equal_the_fp32_reference(client: Client) -> None:
    streams = [client.submit(golden["prompt"], 32) for golden in GOLDENS]
    client.finish()
    same = sum(agreed(stream.tokens, golden) for stream, golden in zip(streams, GOLDENS, strict=True))
    assert same > 0.6 * 32 * len(GOLDENS)


def test_greedy_tokens_alone_equal_the_fp32_reference(client: Client) -> None:
    for golden in GOLDENS[:4]:
        stream = client.submit(golden["prompt"], 32)
        client.finish()
        assert agreed(stream.tokens, golden) > 0


def test_the_same_seed_repeats_its_tokens(client: Client) -> None:
    first, second = (client.submit(GOLDENS[0]["prompt"], 32, seed=7, temperature=1.0) for _ in range(2))
    client.finish()
    assert first.tokens == second.tokens
