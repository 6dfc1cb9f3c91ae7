"""Real HTTP clients of the harness's workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from openai import AsyncOpenAI

from tests.dpu_gateway.harness import Gateway

BASE_URL = "http://blink"


@asynccontextmanager
async def http_client(system: Gateway, worker: int = 0) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.AsyncHTTPTransport(uds=str(system.http_socket(worker)))
    async with httpx2.AsyncClient(transport=transport, base_url=BASE_URL, timeout=30) as client:
        yield client


@asynccontextmanager
async def openai_client(system: Gateway, worker: int = 0) -> AsyncIterator[AsyncOpenAI]:
    """The client that applications use, without retries, so that tests see every answer."""
    async with http_client(system, worker) as client:
        yield AsyncOpenAI(api_key="none", base_url=f"{BASE_URL}/v1", http_client=client, max_retries=0)
