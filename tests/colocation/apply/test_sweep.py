"""When the operator compares its books with the API server, and what becomes of what it does not find there."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from typing import ClassVar, cast

import pytest

from services.colocation.apply.api import Api
from services.colocation.apply.sweep import FIRST_RETRY_SECONDS, Sweep
from services.colocation.decision.model import Key
from services.colocation.observe.store import Store
from tests.colocation.objects import node, pod

SECONDS = 60.0
NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)


class Lists:
    """The API server's side: nodes and pods by name, or no answer."""

    WATCHED: ClassVar[tuple[str, ...]] = ("nodes", "pods")

    def __init__(self) -> None:
        self.present: dict[str, set[Key]] = {"nodes": {Key("", "n0")}, "pods": {Key("batch", "x")}}
        self.away = False
        self.asked = 0

    async def names(self, plural: str) -> tuple[set[Key], int]:
        self.asked += 1
        if self.away:
            raise OSError("connection refused")
        return self.present[plural], 100


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lists() -> Lists:
    return Lists()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> Store:
    store = Store()
    store.set_node(node(), gone=False)
    store.set_pod(pod("x"), gone=False)
    return store


@pytest.fixture
def sweep(lists: Lists, store: Store, clock: Clock) -> Sweep:
    return Sweep(cast(Api, lists), store, SECONDS, clock)


async def test_what_went_unseen_leaves_the_books_when_it_is_due_and_not_before(
    sweep: Sweep, lists: Lists, store: Store, clock: Clock
) -> None:
    lists.present["pods"] = set()
    await sweep.when_due()
    assert lists.asked == 0
    clock.now += SECONDS
    await sweep.when_due()
    assert [each.name for each in store.cluster(NOW, {}, True).nodes] == ["n0"]
    assert store.cluster(NOW, {}, True).nodes[0].others == 0
    asked = lists.asked
    await sweep.when_due()
    assert lists.asked == asked


async def test_one_that_fails_is_tried_again_later_and_later_but_never_more_rarely_than_one_that_does_not(
    sweep: Sweep, lists: Lists, clock: Clock
) -> None:
    lists.away = True
    clock.now += SECONDS
    began, tries = clock.now, []
    for _ in range(400):  # rounds, a second apart
        asked = lists.asked
        try:
            await sweep.when_due()
        except OSError:
            tries.append(clock.now - began)
        assert (lists.asked > asked) == (bool(tries) and tries[-1] == clock.now - began)
        clock.now += 1
    waits = [later - sooner for sooner, later in pairwise(tries)]
    assert waits[:5] == [FIRST_RETRY_SECONDS, 10, 20, 40, SECONDS]
    assert set(waits[5:]) <= {SECONDS}


async def test_after_one_that_went_well_the_next_failure_is_tried_again_soon(
    sweep: Sweep, lists: Lists, clock: Clock
) -> None:
    for _ in range(2):
        lists.away = True
        clock.now += SECONDS
        with pytest.raises(OSError, match="refused"):
            await sweep.when_due()
        lists.away = False
        asked = lists.asked
        clock.now += FIRST_RETRY_SECONDS
        await sweep.when_due()
        assert lists.asked > asked
