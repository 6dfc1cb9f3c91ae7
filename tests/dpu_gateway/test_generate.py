from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from blink.v1 import inference_pb2 as pb

from services.dpu_gateway import model
from services.dpu_gateway.fast_tokenizer import reference
from services.ring.header import RingInfo
from services.ring.schema import RingGeometry
from tests.dpu_gateway.harness import EOS, collect, gateway, max_tokens, model_card, text_request, until
from tests.dpu_gateway.small_tokenizer import CORPUS, byte_level_tokenizer
from tests.support.stand_in_engine import FINGERPRINT, Behaviour
from tests.support.stand_in_lane import LOGPROB, Script

TOKENIZER = byte_level_tokenizer()


def says(text: str, *, end: str = "") -> Script:
    """The model answers ``text``, one token for each byte, then the token ``end``."""
    ids = [TOKENIZER.encode(char).ids for char in text]
    tail = [TOKENIZER.token_to_id(end)] if end else []
    answer = np.array([index for part in ids for index in part] + tail, np.uint32)
    return lambda prompt, limit: answer[:limit]


async def test_a_stream_is_accepted_then_chunks_then_finished() -> None:
    ids = TOKENIZER.encode("The quick brown fox").ids
    async with gateway() as system:
        request = text_request(request_id="mine", stop=max_tokens(2 * len(ids)), sampling=pb.SamplingParams(seed=5))
        result = await collect(system.inference().Generate(request))
    assert result.accepted == pb.Accepted(request_id="mine", prompt_tokens=len(ids), seed=5)
    assert [event.WhichOneof("event") for event in result.events[1:-1]] == ["chunk"] * (len(result.events) - 2)
    assert result.ids == ids + ids
    assert result.text == "The quick brown foxThe quick brown fox"
    assert result.finished.reason == pb.FINISH_REASON_LENGTH
    assert result.finished.usage == pb.Usage(prompt_tokens=len(ids), completion_tokens=2 * len(ids))


async def test_token_ids_are_used_as_they_are_and_an_unset_limit_means_the_whole_context() -> None:
    async with gateway() as system:
        result = await collect(system.inference().Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[65, 66]))))
    assert len(result.ids) == 2048 - 2
    assert result.ids[:4] == [65, 66, 65, 66]
    assert result.finished.usage.completion_tokens == 2046


async def test_chat_messages_are_rendered_with_the_models_template() -> None:
    prompt = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n").ids
    async with gateway() as system:
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
        result = await collect(system.inference().Generate(pb.GenerateRequest(chat=chat, stop=max_tokens(len(prompt)))))
    assert result.ids == prompt


async def test_a_seed_is_drawn_and_told_when_none_was_given() -> None:
    async with gateway() as system:
        calls = [system.inference().Generate(text_request(stop=max_tokens(1))) for _ in range(2)]
        first, second = [await collect(call) for call in calls]
    assert first.accepted.seed != second.accepted.seed
    assert first.accepted.request_id != second.accepted.request_id


async def test_the_end_of_sequence_token_is_counted_and_listed_but_is_not_text() -> None:
    async with gateway(Behaviour(script=says("all done", end=EOS))) as system:
        result = await collect(system.inference().Generate(text_request()))
    assert result.text == "all done"
    assert result.ids[-1] == TOKENIZER.token_to_id(EOS)
    assert result.finished.reason == pb.FINISH_REASON_STOP
    assert result.finished.usage.completion_tokens == len(result.ids)


async def test_a_stop_token_of_the_request_is_no_text_either() -> None:
    (newline,) = TOKENIZER.encode("\n").ids
    async with gateway(Behaviour(script=says("one line\n"))) as system:
        result = await collect(system.inference().Generate(text_request(stop=pb.StopConditions(token_ids=[newline]))))
    assert (result.text, result.ids[-1]) == ("one line", newline)


@pytest.mark.parametrize("burst", [1, 3, 64])
async def test_a_stop_string_across_token_borders_ends_the_stream_at_the_same_token(burst: int) -> None:
    script = says("He said STOP HERE and went on and on")
    async with gateway(Behaviour(script=script, burst=burst)) as system:
        stop = pb.StopConditions(strings=["STOP HERE", "never"])
        result = await collect(system.inference().Generate(text_request(stop=stop)))
        assert result.text == "He said "
        assert result.finished.reason == pb.FINISH_REASON_STOP_STRING
        assert result.finished.stop_string == "STOP HERE"
        assert result.ids == script(np.zeros(0, np.uint32), 1000).tolist()[: len("He said STOP HERE")]
        assert result.finished.usage.completion_tokens == len(result.ids)


async def test_a_stop_string_cancels_in_the_engine_and_its_id_is_free_at_once() -> None:
    async with gateway(Behaviour(tokens_per_second=200)) as system:
        request = text_request("ab", request_id="again", stop=max_tokens(2000, strings=["ba"]))
        for _ in range(3):
            result = await collect(system.inference().Generate(request))
            assert result.finished.reason == pb.FINISH_REASON_STOP_STRING
        await until(lambda: system.session.free_slots == 8)


async def test_what_looked_like_a_stop_string_comes_with_finished() -> None:
    async with gateway(Behaviour(script=says("it ends with STO"))) as system:
        result = await collect(system.inference().Generate(text_request(stop=pb.StopConditions(strings=["STOP"]))))
    assert result.finished.text == "STO"
    assert result.text == "it ends with STO"


async def test_characters_are_never_split_between_chunks() -> None:
    text = "größe 敏捷 🦊👩‍👩‍👧 naïve"
    async with gateway(Behaviour(script=says(text), burst=1, tokens_per_second=2000)) as system:
        result = await collect(system.inference().Generate(text_request()))
    assert result.text == text
    assert "\ufffd" not in "".join(event.chunk.text for event in result.events)


async def test_a_character_cut_off_by_the_limit_comes_with_finished() -> None:
    async with gateway(Behaviour(script=says("🦊"))) as system:
        result = await collect(system.inference().Generate(text_request(stop=max_tokens(1))))
    assert (result.finished.text, result.text) == ("\ufffd", "\ufffd")


@pytest.mark.parametrize("alternatives", [0, 3, 20])
async def test_logprobs_come_one_for_each_token_with_their_alternatives(alternatives: int) -> None:
    async with gateway() as system:
        request = text_request("abc", logprobs=alternatives, stop=max_tokens(7))
        result = await collect(system.inference().Generate(request))
    logprobs = [entry for event in result.events for entry in event.chunk.logprobs]
    assert len(logprobs) == len(result.ids) == 7
    assert result.text == TOKENIZER.decode(result.ids)
    for index, entry in zip(result.ids, logprobs, strict=True):
        assert math.isclose(entry.logprob, LOGPROB)
        assert [(top.token_id, top.logprob) for top in entry.top] == [
            (index + rank, LOGPROB - rank) for rank in range(alternatives)
        ]


async def test_logprobs_are_absent_unless_asked_for() -> None:
    async with gateway() as system:
        result = await collect(system.inference().Generate(text_request(stop=max_tokens(3))))
    assert not any(event.chunk.logprobs for event in result.events)


async def test_logprobs_of_tokens_behind_a_stop_string_are_dropped_with_them() -> None:
    async with gateway(Behaviour(script=says("xx END yy"))) as system:
        request = text_request(logprobs=2, stop=pb.StopConditions(strings=["END"]))
        result = await collect(system.inference().Generate(request))
    assert len(result.ids) == sum(len(event.chunk.logprobs) for event in result.events) == len("xx END")


async def test_many_streams_at_once_get_exactly_their_own_tokens() -> None:
    async with gateway(Behaviour(burst=3)) as system:

        async def one(number: int) -> None:
            ids = [number + 3, 2 * number + 3, 7]
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), stop=max_tokens(50 + number))
            result = await collect(system.inference().Generate(request))
            assert result.ids == np.resize(ids, 50 + number).tolist()
            assert result.text == TOKENIZER.decode(result.ids)

        for _ in range(5):  # slots and arena are used again and again, the log wraps
            await asyncio.gather(*(one(number) for number in range(8)))


async def test_a_megabyte_prompt_stalls_no_other_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = reference(byte_level_tokenizer())  # the fast one is done before much could be stalled
    monkeypatch.setattr(model, "choose", lambda *_: slow)
    info = RingInfo(RingGeometry(2, 8, 1 << 24, 1024), FINGERPRINT, vocabulary_size=640, max_context_tokens=1 << 20)
    async with gateway(Behaviour(tokens_per_second=500), info) as system:
        large = asyncio.create_task(
            collect(system.inference().Generate(text_request("".join(CORPUS) * 3000, stop=max_tokens(1))))
        )
        chunks = 0
        async for event in system.inference().Generate(text_request(stop=max_tokens(10_000))):
            chunks += event.HasField("chunk")
            if large.done():
                break
        result = await large
        assert result.accepted.prompt_tokens > 100_000
        assert chunks >= 10  # all of them while the large prompt was tokenized


async def test_an_end_token_that_did_not_end_generation_is_text() -> None:
    card = model_card()
    letter = TOKENIZER.encode("a").ids
    card.eos_token_ids[:] = letter
    async with gateway(card=card) as system:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=letter), stop=max_tokens(3, ignore_eos=True))
        result = await collect(system.inference().Generate(request))
        assert (result.finished.reason, result.text) == (pb.FINISH_REASON_LENGTH, "aaa")
