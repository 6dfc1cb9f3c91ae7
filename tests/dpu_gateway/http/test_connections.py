from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from services.dpu_gateway.http import protocol
from tests.dpu_gateway.harness import MODEL, Gateway, gateway, until
from tests.dpu_gateway.http.clients import http_client, openai_client
from tests.support.stand_in_engine import Behaviour

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(system: Gateway) -> Connection:
    return await asyncio.open_unix_connection(str(system.http_socket()))


async def read_rest(reader: asyncio.StreamReader) -> bytes:
    """What is left of a connection, however it ends."""
    with suppress(ConnectionError):
        return await reader.read()
    return b""


def post(body: str) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n{body}".encode()


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_client_that_goes_away_frees_its_slot_at_once(stream: str) -> None:
    async with gateway(Behaviour(tokens_per_second=10)) as system:
        _, writer = await connect(system)
        writer.write(post(f'{{"model": "{MODEL}", "prompt": "abc", "n": 2, "stream": {stream}}}'))
        await until(lambda: int(system.engine.lanes[0].live.sum()) == 2)
        writer.close()
        await until(lambda: not system.engine.lanes[0].live.any())
        await until(lambda: system.session.free_slots == 8 and system.workers[0].generations.open_streams == 0)


async def test_requests_of_one_connection_are_answered_in_turn() -> None:
    async with gateway() as system:
        reader, writer = await connect(system)
        writer.write(post(f'{{"model": "{MODEL}", "prompt": "abc", "max_tokens": 3}}') * 3)
        for _ in range(3):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
            assert b'"finish_reason":"length"' in await reader.readexactly(int(length.split()[1]))
        writer.close()


async def test_a_head_that_is_too_long_is_431() -> None:
    async with gateway() as system:
        reader, writer = await connect(system)
        writer.write(b"GET /health HTTP/1.1\r\nx: " + b"a" * protocol.MAX_HEAD_BYTES + b"\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 431")
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /hea",
        b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{",
    ],
)
async def test_a_request_that_does_not_come_whole_loses_its_connection(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(protocol, "BODY_SECONDS", 0.05)
    async with gateway() as system:
        reader, writer = await connect(system)
        writer.write(sent)
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()
        async with http_client(system) as client:  # and nobody else does
            assert (await client.get("/health")).status_code == 200


async def test_a_client_that_does_not_read_loses_its_connection_and_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "WRITE_SECONDS", 0.2)
    async with gateway(Behaviour(burst=16)) as system:
        reader, writer = await asyncio.open_unix_connection(str(system.http_socket()), limit=1 << 10)
        body = f'{{"model": "{MODEL}", "prompt": "abc", "logprobs": 20, "stream": true}}'
        writer.write(post(body))
        await reader.readuntil(b"\r\n")
        await until(lambda: system.workers[0].generations.open_streams == 0)
        await until(lambda: system.session.free_slots == 8)
        assert b"[DONE]" not in await read_rest(reader)
        writer.close()


async def test_idle_connections_keep_nobody_out() -> None:
    async with gateway() as system, http_client(system) as client:
        idle = [await connect(system) for _ in range(300)]
        assert (await client.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1})).json()
        for _, writer in idle:
            writer.close()


async def test_what_is_no_http_is_400() -> None:
    async with gateway() as system:
        reader, writer = await connect(system)
        writer.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_open_answers_finish_while_a_worker_drains() -> None:
    async with gateway(Behaviour(tokens_per_second=100)) as system, openai_client(system) as client:
        answer = asyncio.create_task(client.completions.create(model=MODEL, prompt="abc", max_tokens=60))
        await until(lambda: bool(system.engine.lanes[0].live.any()))
        worker = system.workers.pop()
        await worker.drain()
        assert (await answer).choices[0].finish_reason == "length"
        with pytest.raises(FileNotFoundError if not system.http_socket().exists() else ConnectionRefusedError):
            await connect(system)
