"""Requests that find their beginning in the prefix cache get the tokens and log-probabilities of those that do not, to
the bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.loader import open_checkpoint
from services.ring.schema import DescriptorFlag, LogKind
from tests.gpu_engine.cpu.running import RunningEngine, running, wait_until
from tests.gpu_engine.models.tiny import random_weights, tiny_config, write_gguf

PAGE = 16
PROMPT = [(7 * i) % 60 for i in range(5 * PAGE + 3)]
SAMPLED = {"temperature": 1.0, "seed": 11, "top_p": 0.9}
FLAGS = DescriptorFlag.LOGPROBS | DescriptorFlag.IGNORE_EOS


@pytest.fixture
def tiny(tmp_path: Path) -> Checkpoint:
    config = tiny_config()
    write_gguf(tmp_path / "m.gguf", config, random_weights(config), gguf.GGMLQuantizationType.Q4_1)
    return open_checkpoint(tmp_path)


@dataclass
class Answer:
    cached: int
    tokens: list[int]
    bits: list[tuple[int, bytes]]  # of each token and alternative: its id, its log-probability


def serve(engine: RunningEngine, prompts: list[list[int]], flags: int = 0, **options: Any) -> list[Answer]:
    """All prompts at once, with log-probabilities."""
    fields = {"flags": FLAGS | flags, "top_logprobs": 3} | options
    tags = [engine.submit(slot, prompt, 20, **fields) for slot, prompt in enumerate(prompts)]
    seen: list[np.void] = []

    def finished() -> bool:
        engine.lane.poll()
        seen.extend(engine.lane.read_log())
        engine.lane.acknowledge(now=True)
        return [entry["kind"] for entry in seen].count(LogKind.FINISH) == len(tags)

    wait_until(finished)
    answers = []
    for tag in tags:
        mine = [entry for entry in seen if entry["tag"] == tag]
        said = [entry for entry in mine if entry["kind"] in {LogKind.TOKEN, LogKind.TOP_LOGPROB}]
        answers.append(
            Answer(
                next(int(entry["token"]) for entry in mine if entry["kind"] == LogKind.ADMITTED),
                [int(entry["token"]) for entry in said if entry["kind"] == LogKind.TOKEN],
                [(int(entry["token"]), entry["value"].tobytes()) for entry in said],
            )
        )
    return answers


@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_a_hit_has_the_bits_of_a_miss(tiny: Checkpoint, options: dict[str, Any]) -> None:
    with running(tiny, prefix_cache=True) as engine:
        [miss] = serve(engine, [PROMPT], **options)
        [hit] = serve(engine, [PROMPT], **options)
        [bypass] = serve(engine, [PROMPT], DescriptorFlag.NO_PREFIX_CACHE, **options)
        [salted] = serve(engine, [PROMPT], cache_salt=(1, 2), **options)
        assert [answer.cached for answer in (miss, hit, bypass, salted)] == [0, 5 * PAGE, 0, 0]
        assert miss.bits == hit.bits == bypass.bits == salted.bits


def test_a_conversation_that_goes_on_has_the_bits_of_one_computed_anew(tiny: Checkpoint) -> None:
    with running(tiny, prefix_cache=True) as engine:
        [first] = serve(engine, [PROMPT])
        turn = [*PROMPT, *first.tokens, 1, 2, 3]
        [anew] = serve(engine, [turn], DescriptorFlag.NO_PREFIX_CACHE)
        [found] = serve(engine, [turn])
        assert found.cached == 6 * PAGE > len(PROMPT)  # a page of the answer, too
        assert found.bits == anew.bits


def test_requests_that_share_pages_and_are_preempted_have_the_same_bits(tiny: Checkpoint) -> None:
    prompts = [[*PROMPT[: 3 * PAGE + i], *range(100 + i, 120 + i)] for i in range(8)]
    with running(tiny) as engine:
        expected = [serve(engine, [prompt])[0].bits for prompt in prompts]
    with running(tiny, prefix_cache=True, kv_pages=16, max_batched_tokens=40) as engine:
        for _ in range(3):
            answers = serve(engine, prompts)
            assert [answer.bits for answer in answers] == expected
        assert engine.counters["preemptions"] > 0
        assert engine.counters["prefix_cache_hits"] > 0
        assert engine.counters["kv_pages_free"] == 16
