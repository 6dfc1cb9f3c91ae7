from __future__ import annotations

import numpy as np
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.dpu_gateway.harness import MODEL, gateway, model_card
from tests.dpu_gateway.http.clients import http_client, openai_client
from tests.dpu_gateway.small_tokenizer import byte_level_tokenizer
from tests.dpu_gateway.test_generate import says
from tests.support.stand_in_engine import Behaviour
from tests.support.stand_in_lane import LOGPROB

TOKENIZER = byte_level_tokenizer()
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def test_a_whole_answer_is_the_assistants_message() -> None:
    async with gateway(Behaviour(script=says("hello there"))) as system, openai_client(system) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "hello there")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(prompt).ids)


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    async with gateway(Behaviour(script=says("größe 🦊"), burst=1)) as system, openai_client(system) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "größe 🦊"
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert chunks[-1].usage is not None


async def test_a_stream_is_events_as_the_standard_has_them() -> None:
    async with gateway(Behaviour(script=says("a\nb"))) as system, http_client(system) as client:
        body = {"model": MODEL, "messages": HI, "stream": True}
        response = await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-request-id"] == "mine"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith('data: {"id":"mine",') for event in events[:-2])


async def test_parts_are_joined_and_a_developer_is_the_system() -> None:
    rendered = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
    messages: list[ChatCompletionMessageParam] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]},
    ]
    ids = TOKENIZER.encode(rendered).ids
    async with gateway() as system, openai_client(system) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=len(ids))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].message.content == TOKENIZER.decode(ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_those_of_each_token_with_its_bytes(stream: bool) -> None:
    async with gateway(Behaviour(script=says("🦊!"))) as system, openai_client(system) as client:
        if stream:
            chunks = await client.chat.completions.create(
                model=MODEL, messages=HI, logprobs=True, top_logprobs=3, stream=True
            )
            entries = [
                entry
                async for chunk in chunks
                if chunk.choices[0].logprobs
                for entry in chunk.choices[0].logprobs.content or ()
            ]
        else:
            answer = await client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=3)
            assert answer.choices[0].logprobs is not None
            entries = list(answer.choices[0].logprobs.content or ())
    assert bytes(byte for entry in entries for byte in entry.bytes or ()).decode() == "🦊!"
    assert len(entries) == says("🦊!")(np.zeros(0, np.uint32), 99).size
    assert {entry.logprob for entry in entries} == {LOGPROB}
    assert {len(entry.top_logprobs) for entry in entries} == {3}


async def test_n_answers_are_choices_and_their_prompt_counts_once() -> None:
    async with gateway(Behaviour(script=says("yes"))) as system, openai_client(system) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HI, n=3)
        stream = await client.chat.completions.create(model=MODEL, messages=HI, n=3, stream=True)
        streamed = ["", "", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in answer.choices] == streamed == ["yes"] * 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    assert answer.usage.prompt_tokens < 60


async def test_a_model_without_a_template_refuses_messages_by_name() -> None:
    async with gateway(card=model_card(chat_template="")) as system, http_client(system) as client:
        response = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": HI})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert "no chat template" in response.json()["error"]["message"]
