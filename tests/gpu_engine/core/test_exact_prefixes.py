"""Where rows of one token round otherwise than longer chunks, as on a GPU: a hit still never changes a token."""

from __future__ import annotations

import random

import pytest

from services.ring.schema import DescriptorFlag
from tests.gpu_engine.core.machine import VOCABULARY, Machine
from tests.gpu_engine.core.test_prefix_cache import PAGE, PROMPT, caching, run_until_idle, serve, submit

SLOTS = 4


def conversations(machine: Machine, seed: int) -> list[list[int]]:
    """Answers of conversations of several turns, some of them at once; the questions depend on ``seed`` alone."""
    gateway = machine.attach()
    rng = random.Random(seed)
    asked = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(2, 24))] for _ in range(SLOTS)]
    answers = []
    for _ in range(4):
        at_once = {slot: submit(gateway, asked[slot], slot=slot, max_tokens=9) for slot in range(SLOTS)}
        run_until_idle(machine)
        gateway.read()
        for slot, position in at_once.items():
            answers.append(gateway.stream(position).tokens)
            history = [*asked[slot], *answers[-1], *(rng.randrange(VOCABULARY) for _ in range(3))]
            asked[slot] = asked[rng.randrange(SLOTS)][:] if len(history) > 50 else history
    return answers


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [7, 10, 64])  # chunks are cut in many ways
def test_conversations_get_the_tokens_that_they_get_without_a_cache(seed: int, budget: int) -> None:
    anew = conversations(Machine(rounds=True, page_size=PAGE, max_batched_tokens=64), seed)
    machine = caching(rounds=True, max_batched_tokens=budget)
    assert conversations(machine, seed) == anew
    assert machine.counters()["prefix_cache_hits"] > 0


def test_they_would_get_others_from_pages_of_generated_tokens() -> None:
    """The test above can fail."""
    anew = conversations(Machine(rounds=True, page_size=PAGE, max_batched_tokens=64), 0)
    assert conversations(caching(rounds=True, share_decoded=True), 0) != anew


@pytest.mark.parametrize("budget", range(5, 14))  # two decode rows leave room for three
@pytest.mark.parametrize("tokens", range(2, 24))
def test_no_chunk_of_a_prompt_has_one_token(tokens: int, budget: int) -> None:
    machine = Machine(page_size=PAGE, max_batched_tokens=budget)
    gateway = machine.attach()
    prompts = [list(range(100, 100 + tokens)), list(range(50, 67)), list(range(20, 31))]
    for slot, prompt in enumerate(prompts):
        submit(gateway, prompt, slot=slot, max_tokens=2)
    while True:
        machine.poll()
        if not machine.plan():
            break
        step = machine.scheduler.step
        for row in range(step.rows):
            first, last = int(step.row_start[row]), int(step.row_start[row + 1])
            prompt = prompts[int(step.request[row])]
            assert last - first > 1 or int(step.positions[first]) >= len(prompt)
        machine.commit()
    assert machine.scheduler.idle


@pytest.mark.parametrize("rows", [2, 3])
def test_a_prompt_goes_on_where_decode_rows_leave_room_for_one_or_two_tokens(rows: int) -> None:
    machine = caching(max_batched_tokens=4, rounds=True)
    gateway = machine.attach()
    for slot in range(rows):
        submit(gateway, [100 + slot, 7], slot=slot, max_tokens=60)
        machine.step()
    position = submit(gateway, PROMPT, slot=rows, max_tokens=1)
    for _ in range(len(PROMPT) + 1):
        machine.step()
    gateway.read()
    assert len(gateway.stream(position).tokens) == 1
    run_until_idle(machine)


@pytest.mark.parametrize("budget", [1, 2])
def test_where_the_budget_leaves_no_choice_such_pages_are_not_shared(budget: int) -> None:
    machine = caching(max_batched_tokens=budget, rounds=True)
    gateway = machine.attach()
    prompt = PROMPT[:19]  # an odd number of tokens
    anew = serve(machine, gateway, prompt, flags=DescriptorFlag.NO_PREFIX_CACHE)
    again = [serve(machine, gateway, prompt) for _ in range(2)]
    assert [stream.tokens for stream in again] == [anew.tokens, anew.tokens]
    assert [stream.cached_tokens for stream in again] == [0, 16 if budget == 2 else 0]


def test_a_prompt_of_one_token_shares_nothing() -> None:
    machine = caching(rounds=True)
    gateway = machine.attach()
    serve(machine, gateway, [7], max_tokens=20)
    assert machine.scheduler.cached_prefixes() == []


def test_what_is_recomputed_after_a_preemption_is_a_prompt_and_shared_as_one() -> None:
    machine = caching(page_count=12, max_running=2, max_batched_tokens=64)
    gateway = machine.attach()
    streams = [submit(gateway, [*PROMPT, slot], slot=slot, max_tokens=24) for slot in range(2)]
    run_until_idle(machine)  # checks what the pages hold after each step
    gateway.read()
    assert machine.counters()["preemptions"] > 0
    longest = max(len(prefix) for _, prefix in machine.scheduler.cached_prefixes())
    assert longest > len(PROMPT) + 1
    assert all(len(gateway.stream(position).tokens) == 24 for position in streams)
    machine.check_empty()
