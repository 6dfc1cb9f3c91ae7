"""What requests find of earlier ones, what they don't, and that no page is lost whatever ends those that share it."""

from __future__ import annotations

import random

import pytest

from services.ring.schema import DescriptorFlag, FinishReason
from tests.gpu_engine.core.machine import Gateway, Machine, Stream, expected_tokens, record

PAGE = 4
PROMPT = list(range(20, 41))  # 21 tokens: five pages and one token
RECORD_SPACE = 512


def caching(
    *,
    page_count: int = 64,
    max_running: int = 8,
    max_batched_tokens: int = 16,
    threads: int = 1,
    share_decoded: bool = False,
    rounds: bool = False,
) -> Machine:
    return Machine(
        prefix_cache=True,
        page_size=PAGE,
        page_count=page_count,
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        threads=threads,
        share_decoded=share_decoded,
        rounds=rounds,
    )


def submit(gateway: Gateway, prompt: list[int], *, slot: int = 0, max_tokens: int = 4, **fields: object) -> int:
    data = record(prompt, slot=slot, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    return gateway.submit(data, slot * RECORD_SPACE)


def run_until_idle(machine: Machine, limit: int = 500) -> None:
    for _ in range(limit):
        if not machine.step() and machine.scheduler.idle:
            machine.check_pages()
            return
        machine.check_pages()
    raise AssertionError("no end in sight")


def serve(machine: Machine, gateway: Gateway, prompt: list[int], **fields: object) -> Stream:
    """One request, alone, from its submission to its end."""
    position = submit(gateway, prompt, **fields)  # type: ignore[arg-type]
    run_until_idle(machine)
    gateway.read()
    return gateway.stream(position)


def test_what_an_earlier_request_computed_is_not_computed_again() -> None:
    machine = caching()
    gateway = machine.attach()
    first = serve(machine, gateway, PROMPT)
    computed = machine.counters()["prompt_tokens"]
    again = serve(machine, gateway, PROMPT)
    assert (first.cached_tokens, again.cached_tokens) == (0, 16)
    assert again.tokens == first.tokens == expected_tokens(PROMPT, max_tokens=4)[0]
    assert machine.counters()["prompt_tokens"] - computed == 5
    assert machine.counters()["prefix_cache_queries"] == 42
    assert machine.counters()["prefix_cache_hits"] == 16
    machine.check_empty()


@pytest.mark.parametrize(("tokens", "cached"), [(5, 0), (6, 4), (8, 4), (9, 4), (10, 8)])
def test_the_last_two_tokens_of_a_prompt_are_always_computed(tokens: int, cached: int) -> None:
    machine = caching()
    gateway = machine.attach()
    serve(machine, gateway, PROMPT)
    assert serve(machine, gateway, PROMPT[:tokens]).cached_tokens == cached


def test_without_the_setting_nothing_is_kept() -> None:
    machine = Machine(page_size=PAGE)
    gateway = machine.attach()
    assert [serve(machine, gateway, PROMPT).cached_tokens for _ in range(2)] == [0, 0]
    assert machine.counters()["prefix_cache_queries"] == 0
    assert machine.scheduler.idle_pages == 0


def test_salts_keep_requests_apart() -> None:
    machine = caching()
    gateway = machine.attach()
    salts = [(0, 0), (0, 1), (1, 0), (0, 1)]
    found = [serve(machine, gateway, PROMPT, cache_salt=salt).cached_tokens for salt in salts]
    assert found == [0, 0, 0, 16]


def test_salts_keep_requests_apart_where_hashes_are_the_same() -> None:
    machine = caching()
    machine.scheduler.set_prefix_key_mask(0)
    gateway = machine.attach()
    prompt = PROMPT[:6]  # one page, so that one key serves it
    salts = [(0, 0), (0, 1), (1, 0), (0, 0)]
    assert [serve(machine, gateway, prompt, cache_salt=salt).cached_tokens for salt in salts] == [0, 0, 0, 4]


def test_a_request_may_neither_find_nor_be_found() -> None:
    machine = caching()
    gateway = machine.attach()
    flags = DescriptorFlag.NO_PREFIX_CACHE
    assert serve(machine, gateway, PROMPT, flags=flags).cached_tokens == 0
    assert machine.scheduler.cached_prefixes() == []
    serve(machine, gateway, PROMPT)
    assert serve(machine, gateway, PROMPT, flags=flags).cached_tokens == 0
    assert machine.counters()["prefix_cache_queries"] == len(PROMPT)


@pytest.mark.parametrize(("share_decoded", "cached"), [(True, 32), (False, 20)])
def test_a_conversation_goes_on_from_its_own_answers_where_they_are_shared(share_decoded: bool, cached: int) -> None:
    machine = caching(share_decoded=share_decoded)
    gateway = machine.attach()
    answer = serve(machine, gateway, PROMPT, max_tokens=12)
    assert answer.reason is FinishReason.LENGTH
    turn = [*PROMPT, *answer.tokens, 7, 8, 9]
    # the last token of an answer was never computed: 32 of 33
    assert serve(machine, gateway, turn).cached_tokens == cached


def test_requests_that_run_are_found_too_and_their_pages_counted_once() -> None:
    machine = caching(page_count=14)
    gateway = machine.attach()
    first = submit(gateway, PROMPT, slot=0, max_tokens=12)  # 9 pages in the end
    for _ in range(3):
        machine.step()
    others = [submit(gateway, [*PROMPT[:20], 50 + slot, 60], slot=slot, max_tokens=2) for slot in (1, 2)]
    machine.step()
    assert machine.scheduler.running == 3  # 6 + 1 + 1 pages, where each alone needs 6
    machine.check_pages()
    run_until_idle(machine)
    gateway.read()
    assert gateway.stream(first).tokens == expected_tokens(PROMPT, max_tokens=12)[0]
    assert [gateway.stream(position).cached_tokens for position in others] == [20, 20]


def test_the_same_prompt_at_once_is_computed_twice_and_kept_once() -> None:
    machine = caching(max_batched_tokens=64)
    gateway = machine.attach()
    for slot in range(2):
        submit(gateway, PROMPT, slot=slot, max_tokens=8)
    machine.step()
    machine.check_pages()
    assert len(machine.scheduler.cached_prefixes()) == 5
    assert machine.scheduler.free_pages == 64 - 5 - 2
    run_until_idle(machine)


def test_the_longest_idle_prefix_makes_room_first_and_its_end_before_its_beginning() -> None:
    machine = caching(page_count=16)
    gateway = machine.attach()
    prompts = [[first, *range(100, 120)] for first in range(3)]  # 5 full pages each
    for prompt in prompts:
        serve(machine, gateway, prompt, max_tokens=1)
    assert machine.scheduler.idle_pages == 15
    serve(machine, gateway, prompts[0], max_tokens=1)  # found, so now the second is the oldest
    serve(machine, gateway, list(range(150, 163)), max_tokens=1)  # 4 pages; 1 is free
    left = {tuple(prefix) for _, prefix in machine.scheduler.cached_prefixes()}
    assert [max(n for n in range(6) if tuple(p[: 4 * n]) in left or n == 0) for p in prompts] == [5, 2, 5]
    machine.check_empty()


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    machine = caching(page_count=13, max_running=2)
    gateway = machine.attach()
    first = submit(gateway, PROMPT, slot=0, max_tokens=24)
    machine.step()
    second = submit(gateway, [*PROMPT[:8], *range(60, 73)], slot=1, max_tokens=24)
    run_until_idle(machine)
    gateway.read()
    assert machine.counters()["preemptions"] > 0
    assert gateway.stream(first).tokens == expected_tokens(PROMPT, max_tokens=24)[0]
    assert gateway.stream(second).tokens == expected_tokens([*PROMPT[:8], *range(60, 73)], max_tokens=24)[0]
    assert machine.counters()["prompt_tokens"] <= len(PROMPT) + 13  # what was shared or recomputed is not counted again
    machine.check_empty()


def test_higher_priority_displaces_only_where_that_gives_pages() -> None:
    machine = caching(page_count=8, max_running=4)
    gateway = machine.attach()
    low = submit(gateway, PROMPT, slot=0, max_tokens=8, priority=-1)
    for _ in range(3):
        machine.step()
    high = submit(gateway, list(range(60, 81)), slot=1, max_tokens=4, priority=1)
    run_until_idle(machine)
    gateway.read()
    for position in (low, high):
        assert gateway.stream(position).reason in {FinishReason.LENGTH, FinishReason.STOP}
    assert machine.counters()["preemptions"] == 1
    machine.check_empty()


def test_a_cancelled_request_gives_its_references_back() -> None:
    machine = caching(share_decoded=True)
    gateway = machine.attach()
    serve(machine, gateway, PROMPT)
    position = submit(gateway, PROMPT, max_tokens=20)
    machine.step()
    assert machine.scheduler.idle_pages == 1  # the page that its answer filled
    gateway.client.cancel(0, position)
    run_until_idle(machine)
    machine.check_empty()
    assert serve(machine, gateway, PROMPT).cached_tokens == 16


def test_a_request_that_waits_for_pages_is_searched_for_once_until_the_cache_changes() -> None:
    machine = caching(page_count=13)
    gateway = machine.attach()
    serve(machine, gateway, PROMPT[:10])
    first = submit(gateway, list(range(60, 91)), slot=0, max_tokens=16)  # 8 pages, 12 in the end
    machine.step()
    second = submit(gateway, PROMPT, slot=1)  # 6 pages, of which 2 are there
    before = machine.scheduler.prefix_searches
    for _ in range(4):
        machine.step()
    assert (machine.scheduler.running, machine.scheduler.waiting) == (1, 1)
    assert machine.scheduler.prefix_searches == before + 2  # the first step filled pages of the other prompt
    run_until_idle(machine)
    gateway.read()
    for position, prompt, tokens in ((first, list(range(60, 91)), 16), (second, PROMPT, 4)):
        assert gateway.stream(position).tokens == expected_tokens(prompt, max_tokens=tokens)[0]
    machine.check_empty()


@pytest.mark.parametrize("mask", [0, 1, 6])
@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_decide_where_hashes_are_the_same(mask: int, threads: int) -> None:
    machine = caching(page_count=24, threads=threads)
    machine.scheduler.set_prefix_key_mask(mask)
    gateway = machine.attach()
    rng = random.Random(mask)
    asked = []
    for _ in range(12 if threads == 1 else 4):
        for slot in range(4):
            prompt = [rng.randrange(2), *range(10, 10 + rng.randrange(4, 24))]
            if rng.randrange(2):
                prompt[rng.randrange(1, len(prompt))] = 99
            asked.append((prompt, submit(gateway, prompt, slot=slot, seed=slot)))
        run_until_idle(machine)
        gateway.read()
    for prompt, position in asked:
        stream = gateway.stream(position)
        assert stream.tokens == expected_tokens(prompt, max_tokens=4, seed=(asked.index((prompt, position))) % 4)[0]
    machine.check_empty()


def test_equal_tokens_after_others_are_not_the_same() -> None:
    first, other = [1, *PROMPT[1:10]], [2, *PROMPT[1:10]]
    for shift in range(60):  # among so many keys of three bits the second pages' agree where the first ones' do not
        machine = caching()
        machine.scheduler.set_prefix_key_mask(7 << shift)
        gateway = machine.attach()
        serve(machine, gateway, first)
        serve(machine, gateway, other[:6])
        assert serve(machine, gateway, other).cached_tokens in {0, 4}


def test_the_queue_of_idle_pages_is_compacted_when_it_is_full_of_void_entries() -> None:
    machine = caching(page_count=8)
    gateway = machine.attach()
    first = serve(machine, gateway, PROMPT)
    for _ in range(20):  # five entries each time, of which the last five count; the queue holds 16
        assert serve(machine, gateway, PROMPT).tokens == first.tokens
    machine.check_empty()
