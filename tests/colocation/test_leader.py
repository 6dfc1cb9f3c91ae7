"""Whoever leads stops with its lease, its own cancellation or a failure of what it does; none of them is swallowed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from services.colocation.leader import Election
from services.colocation.settings import OperatorSettings

LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"


@dataclass
class Cluster:
    """An API server that knows one lease. While ``away`` it answers every call with an error."""

    election: Election = field(init=False)
    lease: dict[str, Any] | None = None
    away: bool = False

    async def answer(self, request: web.Request) -> web.Response:
        if self.away:
            raise web.HTTPServiceUnavailable
        if request.method != "GET":
            self.lease = await request.json()
        if self.lease is None:
            raise web.HTTPNotFound
        return web.json_response(self.lease)


@asynccontextmanager
async def cluster(lease_seconds: int = 1) -> AsyncIterator[Cluster]:
    made = Cluster()
    app = web.Application()
    app.router.add_post(LEASES, made.answer)
    app.router.add_route("*", f"{LEASES}/blink-operator", made.answer)
    settings = OperatorSettings.model_construct(lease_seconds=lease_seconds, identity="me")
    async with TestServer(app) as server, ApiClient(Configuration(host=str(server.make_url("")))) as client:
        made.election = Election(client, settings)
        yield made


class Act:
    """What the leader does: stands until it is cancelled, and then until it may end."""

    def __init__(self) -> None:
        self.began, self.cancelled, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
            await self.may_end.wait()


async def ends_cancelled(leading: asyncio.Task[None]) -> bool:
    await asyncio.wait([leading], timeout=10)
    return leading.cancelled()


async def test_a_cancellation_while_it_waits_for_the_lease_ends_it() -> None:
    async with cluster() as made:
        made.away = True
        leading = asyncio.create_task(made.election.lead(Act()))
        await asyncio.sleep(0)
        leading.cancel()
        assert await ends_cancelled(leading)


async def test_a_cancellation_while_it_leads_ends_it_once_what_it_does_has_ended() -> None:
    act = Act()
    async with cluster(lease_seconds=60) as made:
        leading = asyncio.create_task(made.election.lead(act))
        await act.began.wait()
        leading.cancel()
        await act.cancelled.wait()
        assert not leading.done()
        act.may_end.set()
        assert await ends_cancelled(leading)


async def test_a_cancellation_while_what_it_does_winds_down_ends_it() -> None:
    act = Act()
    async with cluster() as made:
        leading = asyncio.create_task(made.election.lead(act))
        await act.began.wait()
        made.away = True
        await act.cancelled.wait()  # the lease is lost
        leading.cancel()
        await asyncio.sleep(0)
        act.may_end.set()
        assert await ends_cancelled(leading)


async def test_a_lost_lease_ends_what_it_does_and_a_regained_one_begins_it_anew() -> None:
    act = Act()
    act.may_end.set()
    async with cluster() as made:
        leading = asyncio.create_task(made.election.lead(act))
        await act.began.wait()
        made.away = True
        await act.cancelled.wait()
        act.began.clear()
        made.away = False
        await act.began.wait()
        leading.cancel()
        assert await ends_cancelled(leading)


async def test_what_it_does_fails_for_whoever_leads() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async with cluster() as made:
        with pytest.raises(ZeroDivisionError):
            await made.election.lead(fail)
