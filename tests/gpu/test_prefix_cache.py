"""The prefix cache in both control loops on a GPU: the same tokens with hits and without, and every page comes back."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda engine's libraries are not installed: pip install 'blink[cuda]'")

from services.gpu_engine.cuda.assemble import SchedulerPlace
from services.gpu_engine.cuda.step_loop import CoreAudit
from services.gpu_engine.models.checkpoint import Checkpoint
from services.ring.schema import DescriptorFlag, FinishReason
from tests.gpu.model_serving import Client, serving_model
from tests.gpu.serving import finish, serving, until
from tests.gpu.test_same_tokens import CHOSEN, GENERATED, PAGE_SIZE, limits
from tests.gpu_engine.core.machine import Gateway, Stream, expected_tokens, record

pytestmark = pytest.mark.usefixtures("device")  # which skips where there is no GPU

PROMPT = list(range(20, 41))  # five pages of 4, and one token
SPAN = 1024  # arena bytes of a slot
SLOTS, REQUESTS = 8, 300


def serve(gateway: Gateway, prompt: list[int], *, cache_salt: int = 0, flags: int = 0) -> Stream:
    data = record(prompt, max_tokens=4, cache_salt=(cache_salt, 0), flags=flags)  # type: ignore[arg-type]
    position = gateway.submit(data, 0)
    finish(gateway)
    return gateway.stream(position)


def test_prompts_salts_and_bypasses_find_what_is_theirs(scheduler: SchedulerPlace) -> None:
    with serving(scheduler=scheduler, prefix_cache=True) as engine:
        gateway = engine.attach()
        answers = [
            serve(gateway, PROMPT),
            serve(gateway, PROMPT),
            serve(gateway, PROMPT, cache_salt=1),
            serve(gateway, PROMPT, cache_salt=1),
            serve(gateway, PROMPT, flags=DescriptorFlag.NO_PREFIX_CACHE),
            serve(gateway, PROMPT[:10]),
        ]
        counters = engine.status().counters
        engine.stop()
        assert [answer.cached_tokens for answer in answers] == [0, 16, 0, 16, 0, 8]
        assert all(answer.tokens == expected_tokens(PROMPT, max_tokens=4)[0] for answer in answers[:5])
        assert (counters["prefix_cache_queries"], counters["prefix_cache_hits"]) == (4 * 21 + 10, 40)
        assert engine.step.faults() == 0


@pytest.mark.parametrize("page_count", [64, 18])  # plenty; preempted all the time
def test_requests_that_share_their_beginnings_get_their_tokens(scheduler: SchedulerPlace, page_count: int) -> None:
    pick = random.Random(page_count)
    with serving(scheduler=scheduler, prefix_cache=True, page_count=page_count) as engine:
        gateway = engine.attach()
        free = list(range(SLOTS))
        live: dict[int, int] = {}  # position -> slot
        asked: dict[int, tuple[list[int], int]] = {}
        said: list[list[int]] = []  # prompts and their answers: conversations that go on

        def work() -> bool:
            while free and len(asked) < REQUESTS:
                begin = pick.choice(said) if said and pick.random() < 0.5 else [pick.randrange(3), *range(100, 130)]
                prompt = [*begin[: pick.randint(1, 36)], *(pick.randrange(211) for _ in range(pick.randint(1, 4)))]
                most, salt = pick.randint(1, 20), pick.randrange(2)
                slot = free.pop()
                fields = {"cache_salt": (salt, 0), "priority": pick.randint(-2, 2)}
                data = record(prompt, slot=slot, max_tokens=most, **fields)  # type: ignore[arg-type]
                position = gateway.submit(data, slot * SPAN)
                live[position], asked[position] = slot, (prompt, most)
            gateway.read()
            for position in [p for p in live if gateway.stream(p).reason is not None]:
                free.append(live.pop(position))
                said.append([*asked[position][0], *gateway.stream(position).tokens])
            return bool(live or len(asked) < REQUESTS)

        until(lambda: not work())
        counters = engine.status().counters
        engine.stop()
        for position, (prompt, most) in asked.items():
            stream = gateway.stream(position)
            assert (stream.tokens, stream.reason) == expected_tokens(prompt, max_tokens=most)
        assert engine.step.faults() == 0
        assert counters["kv_pages_free"] == page_count
        assert engine.loop.audit() == CoreAudit(0, page_count, 8, held_arena_lines=0, promised_log_entries=0)
        assert counters["prefix_cache_hits"] > counters["prefix_cache_queries"] // 20
        assert counters["preemptions"] > 0 or page_count == 64


@pytest.mark.model
def test_a_model_says_the_same_with_hits_and_without(smollm2: Checkpoint) -> None:
    prompts = [[*golden["prompt"]] for golden in CHOSEN if len(golden["prompt"]) > PAGE_SIZE + 1]

    def answers(client: Client) -> list[Stream]:
        streams = [client.submit(prompt, GENERATED) for prompt in prompts]
        client.finish()
        assert all(stream.reason is FinishReason.LENGTH for stream in streams)
        return streams

    with serving_model(smollm2, limits()) as client:
        computed = [stream.tokens for stream in answers(client)]
    with serving_model(smollm2, limits(prefix_cache=True)) as client:
        for attempt in range(3):
            streams = answers(client)
            assert [stream.tokens for stream in streams] == computed
            pages = [(len(prompt) - 2) // PAGE_SIZE if attempt else 0 for prompt in prompts]
            assert [stream.cached_tokens for stream in streams] == [PAGE_SIZE * count for count in pages]


@pytest.mark.model
@pytest.mark.parametrize("share_decoded", [False, True])
def test_conversations_find_their_prompts_and_their_answers_only_where_asked_for(
    smollm2: Checkpoint, share_decoded: bool
) -> None:
    """Turns of conversations; each turn's prompt holds what was said before, of the uncached run."""
    turns = [[*golden["prompt"]] for golden in CHOSEN if len(golden["prompt"]) > PAGE_SIZE + 1]
    prompts, answers = [], []
    with serving_model(smollm2, limits(context=1024)) as client:
        for _ in range(3):
            streams = [client.submit(turn, GENERATED) for turn in turns]
            client.finish()
            prompts.append(turns)
            answers.append([stream.tokens for stream in streams])
            turns = [[*turn, *stream.tokens, *turn[:7]] for turn, stream in zip(turns, streams, strict=True)]
    with serving_model(smollm2, limits(context=1024, prefix_cache=True, share_decoded=share_decoded)) as client:
        for turn in range(2 if share_decoded else 3):
            streams = [client.submit(prompt, GENERATED) for prompt in prompts[turn]]
            client.finish()
            known = [len(prompt) + (GENERATED - 1 if share_decoded else 0) for prompt in prompts[turn - 1]]
            cached = [count // PAGE_SIZE * PAGE_SIZE if turn else 0 for count in known]
            assert [stream.cached_tokens for stream in streams] == cached
            if not share_decoded:  # else another token may come where two are as good as equal
                assert [stream.tokens for stream in streams] == answers[turn]
