from __future__ import annotations

import asyncio
import os
import time

import psutil
import pytest
import uvloop

from services.dpu_gateway.ticker import Ticker


def run(test: object) -> None:
    """On both event loops."""
    asyncio.run(test())  # type: ignore[operator]
    uvloop.run(test())  # type: ignore[operator]


def test_ticks_come_at_their_period_also_below_a_millisecond() -> None:
    async def test() -> None:
        ticker = Ticker()
        ticker.set_period(300e-6)
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(200):
            await ticker.wait()
        elapsed = time.perf_counter() - start
        assert elapsed >= 0.95 * 200 * 300e-6  # never early, and never spinning
        assert time.process_time() - cpu < 0.8 * elapsed
        ticker.close()

    run(test)


def test_ticks_that_nobody_waited_for_count_as_one() -> None:
    async def test() -> None:
        ticker = Ticker()
        ticker.set_period(0.001)
        time.sleep(0.02)  # noqa: ASYNC251 - the loop stands still
        await asyncio.sleep(0.0)
        assert await ticker.wait() >= 20
        start = time.perf_counter()
        for _ in range(5):
            await ticker.wait()
        assert time.perf_counter() - start >= 0.003
        ticker.close()

    run(test)


def test_a_new_period_takes_effect_at_once() -> None:
    async def test() -> None:
        ticker = Ticker()
        ticker.set_period(3600)
        waiting = asyncio.create_task(ticker.wait())
        await asyncio.sleep(0)
        ticker.set_period(0.0001)
        async with asyncio.timeout(5):
            await waiting
        ticker.close()

    run(test)


def test_close_gives_the_descriptor_back() -> None:
    async def test() -> None:
        before = psutil.Process().num_fds()
        ticker = Ticker()
        ticker.close()
        assert psutil.Process().num_fds() == before

    run(test)


def test_a_period_that_the_kernel_refuses_is_an_error() -> None:
    async def test() -> None:
        ticker = Ticker()
        with pytest.raises(OSError, match=os.strerror(22)):
            ticker.set_period(-1)
        ticker.close()

    run(test)
