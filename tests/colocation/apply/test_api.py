"""What can become of a call is among the errors that a round survives."""

from __future__ import annotations

import asyncio

import pytest
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException

from services.colocation.apply.api import Api, describe, is_lasting
from services.colocation.apply.executor import CALL_ERRORS
from services.colocation.leader import Election
from services.colocation.settings import OperatorSettings


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As an API server does that ends, or that has waited long enough on a connection."""
    await reader.read(1)
    writer.close()


async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"what?\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("answer", [hang_up, garble])
async def test_a_server_that_hangs_up_or_garbles_ends_a_call_and_not_a_round(answer: object) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)  # type: ignore[arg-type]
    port = server.sockets[0].getsockname()[1]
    async with server, ApiClient(Configuration(host=f"http://127.0.0.1:{port}")) as client:
        with pytest.raises(CALL_ERRORS) as caught:
            await Api(client).patch_pool("p", {"status": {}})
    assert describe(caught.value)


@pytest.mark.parametrize("answer", [hang_up, garble])
async def test_a_server_that_hangs_up_or_garbles_costs_the_election_one_try(answer: object) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)  # type: ignore[arg-type]
    port = server.sockets[0].getsockname()[1]
    async with server, ApiClient(Configuration(host=f"http://127.0.0.1:{port}")) as client:
        assert not await Election(client, OperatorSettings())._take()


async def test_a_server_that_is_not_there_ends_a_call_and_not_a_round() -> None:
    async with ApiClient(Configuration(host="http://127.0.0.1:9")) as client:
        with pytest.raises(CALL_ERRORS):
            await Api(client).patch_pool("p", {"status": {}})


@pytest.mark.parametrize(
    ("status", "body", "lasts"),
    [
        (400, "", True),
        (403, "", True),
        (422, "", True),
        (409, '{"reason": "AlreadyExists"}', True),
        (409, '{"reason": "Conflict", "message": "Operation cannot be fulfilled on resourcequotas"}', False),
        (409, "[]", False),
        (409, None, False),
        (429, "", False),
        (500, "", False),
    ],
)
def test_a_refusal_lasts_but_for_a_conflict_of_versions(status: int, body: str | None, lasts: bool) -> None:
    refusal = ApiException(status=status)
    refusal.body = body
    assert is_lasting(refusal) is lasts
