from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.dpu_gateway.harness import MODEL, gateway, until
from tests.dpu_gateway.http.clients import openai_client
from tests.dpu_gateway.small_tokenizer import byte_level_tokenizer
from tests.dpu_gateway.test_generate import says
from tests.support.stand_in_engine import Behaviour
from tests.support.stand_in_lane import LOGPROB

TOKENIZER = byte_level_tokenizer()
NOTHING = np.zeros(0, np.uint32)
PROMPT = "The quick brown fox"


async def test_a_whole_completion_has_text_reason_and_usage() -> None:
    count = len(TOKENIZER.encode(PROMPT).ids)
    async with gateway() as system, openai_client(system) as client:
        answer = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2 * count)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (PROMPT * 2, "length", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (count, 2 * count)
    assert answer.usage.total_tokens == 3 * count


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_streamed_completion_is_the_same_text_in_parts_and_usage_comes_when_asked_for(
    include_usage: bool,
) -> None:
    """The engine makes four more tokens, which end at least one character, only once the client has the ones before."""
    made = 0.0  # the engine's clock, at one token a second
    tokens = says("größe 🦊 and so on")(NOTHING, 99).size
    behaviour = Behaviour(script=says("größe 🦊 and so on"), tokens_per_second=1, clock=lambda: made)
    async with gateway(behaviour) as system, openai_client(system) as client:
        opening = asyncio.create_task(
            client.completions.create(
                model=MODEL, prompt=PROMPT, stream=True, stream_options={"include_usage": include_usage}
            )
        )
        await until(lambda: bool(system.engine.lanes[0].live.any()))
        made += 4
        chunks = []
        async for chunk in await opening:
            chunks.append(chunk)
            made += 4
    assert len({chunk.id for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == "größe 🦊 and so on"
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert len(choices) >= tokens // 4 > 3
    assert (chunks[-1].usage is not None) is include_usage
    if include_usage:
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == tokens
        assert {chunk.usage for chunk in chunks[:-1]} == {None}


async def test_usage_comes_with_every_event_when_asked_for_as_load_tools_do() -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    made = 0.0  # the engine's clock, at one token a second
    behaviour = Behaviour(tokens_per_second=1, clock=lambda: made, cached_tokens=3)
    async with gateway(behaviour) as system, openai_client(system) as client:
        opening = asyncio.create_task(
            client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, stream=True, stream_options=options)
        )
        await until(lambda: bool(system.engine.lanes[0].live.any()))
        made += 4
        counts = []
        async for chunk in await opening:
            assert chunk.usage is not None
            counts.append(chunk.usage.completion_tokens)
            if counts[-1]:
                assert chunk.usage.prompt_tokens_details is not None
                assert chunk.usage.prompt_tokens_details.cached_tokens == 3
            made += 4
    assert counts == sorted(counts)
    assert counts[-1] == 20
    assert len(set(counts)) >= 4


async def test_stop_strings_end_the_text_before_them() -> None:
    behaviour = Behaviour(script=says("He said STOP HERE and went on"))
    async with gateway(behaviour) as system, openai_client(system) as client:
        for stop in ("STOP HERE", ["never", "STOP HERE"]):
            answer = await client.completions.create(model=MODEL, prompt=PROMPT, stop=stop)
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("He said ", "stop")


async def test_several_prompts_times_n_are_choices_in_order_and_prompts_count_once() -> None:
    prompts = ["abc", "hello world"]
    counts = [len(TOKENIZER.encode(prompt).ids) for prompt in prompts]
    async with gateway() as system, openai_client(system) as client:
        answer = await client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=counts[0])
        streamed: dict[int, str] = {}
        stream = await client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=counts[0], stream=True)
        async for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in answer.choices] == ["abc", "abc", "hel", "hel"]
    assert streamed == {choice.index: choice.text for choice in answer.choices}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(counts), 4 * counts[0])


async def test_token_ids_are_prompts_too_and_echo_gives_their_text() -> None:
    ids = TOKENIZER.encode("abc").ids
    async with gateway() as system, openai_client(system) as client:
        for prompt in (ids, [ids, ids], "abc"):
            answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=len(ids), echo=True)
            assert {choice.text for choice in answer.choices} == {"abcabc"}
        stream = await client.completions.create(model=MODEL, prompt=ids, max_tokens=len(ids), echo=True, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "abcabc"


async def test_logprobs_are_those_of_each_token_with_alternatives_and_offsets() -> None:
    async with gateway() as system, openai_client(system) as client:
        answer = await client.completions.create(model=MODEL, prompt="abc", max_tokens=7, logprobs=2)
        stream = await client.completions.create(model=MODEL, prompt="abc", max_tokens=7, logprobs=2, stream=True)
        parts = [chunk.choices[0].logprobs async for chunk in stream]
        without = await client.completions.create(model=MODEL, prompt="abc", max_tokens=7, logprobs=0)
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs == [LOGPROB] * 7
    assert [len(alternatives) for alternatives in logprobs.top_logprobs] == [2] * 7
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:index])) for index in range(7)]
    assert [offset for part in parts if part for offset in part.text_offset or ()] == logprobs.text_offset
    assert without.choices[0].logprobs is not None
    assert without.choices[0].logprobs.top_logprobs == [{}] * 7


async def test_sampling_and_seed_reach_the_engine_as_over_grpc() -> None:
    async with gateway() as system, openai_client(system) as client:
        await client.completions.create(
            model=MODEL,
            prompt="abc",
            max_tokens=3,
            n=2,
            seed=-1,
            temperature=0.5,
            top_p=0.25,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            extra_body={"top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5, "priority": 2, "ignore_eos": True},
        )
        descriptors = list(system.engine.lanes[0].descriptors)
    assert len(descriptors) == 2
    assert sorted(int(each["seed"]) for each in descriptors) == [0, (1 << 64) - 1]
    for each in descriptors:
        assert (each["temperature"], each["top_p"], each["min_p"], each["top_k"]) == (0.5, 0.25, 0.125, 7)
        assert (each["presence_penalty"], each["frequency_penalty"], each["repetition_penalty"]) == (1.0, -1.0, 1.5)
        assert (each["priority"], each["flags"]) == (2, 1)
