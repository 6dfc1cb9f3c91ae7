"""Scrapes the gateways of every pool that has limits."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import aiohttp
from yarl import URL

from services.colocation.decision.model import Reading
from services.colocation.errors import ScrapeError
from services.colocation.slo.window import Scrape, SlidingWindow, parse
from services.common.logging import get_logger


class SloWatch:
    """One sliding window for each pool. Where gateways of its do not answer, the reading is of the others."""

    def __init__(self, timeout: float) -> None:
        self.readings: dict[str, Reading | None] = {}
        self.errors: dict[str, str] = {}
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._windows: dict[str, tuple[tuple[str, ...], SlidingWindow]] = {}
        self._log = get_logger()

    async def look(self, guards: Mapping[str, Mapping[str, Any]]) -> None:
        """Scrape once; ``guards`` are the pools' ``sloGuard``s by name."""
        for gone in set(self._windows) - set(guards):
            del self._windows[gone]
        self.readings = {name: self.readings.get(name) for name in guards}
        self.errors = {name: text for name, text in self.errors.items() if name in guards}
        async with aiohttp.ClientSession(timeout=self._timeout) as session:
            await asyncio.gather(*(self._look_at(session, name, guard) for name, guard in guards.items()))

    async def _look_at(self, session: aiohttp.ClientSession, name: str, guard: Mapping[str, Any]) -> None:
        urls, seconds = tuple(guard["metricsURLs"]), float(guard.get("windowSeconds", 60))
        known = self._windows.get(name)
        if known is None or known[0] != urls or known[1].seconds != seconds:
            known = self._windows[name] = (urls, SlidingWindow(seconds))
        window = known[1]
        try:
            targets = [target for url in urls for target in await _resolve(url)]
        except ScrapeError as error:
            self._tell(name, str(error))
            self.readings[name] = None
            window.forget()
            return
        answers = await asyncio.gather(*(_try_to_scrape(session, *target) for target in targets))
        told = dict(zip(targets, answers, strict=True))
        errors = [str(each) for each in answers if isinstance(each, ScrapeError)]
        self._tell(name, errors[0] if errors else "")
        scrapes = {target: each for target, each in told.items() if isinstance(each, Scrape)}
        window.take(time.monotonic(), scrapes, told.keys() - scrapes.keys())
        reading = window.reading()
        self.readings[name] = replace(reading, partial=bool(errors)) if reading and scrapes else None

    def _tell(self, name: str, error: str) -> None:
        if not error:
            self.errors.pop(name, None)
            return
        if self.errors.get(name) != error:
            self._log.warning("metrics_unreadable", pool=name, error=error)
        self.errors[name] = error


async def _try_to_scrape(session: aiohttp.ClientSession, url: str, address: str) -> Scrape | ScrapeError:
    try:
        return await _scrape(session, url, address)
    except ScrapeError as error:
        return error


async def _resolve(url: str) -> list[tuple[str, str]]:
    """``url`` with each address that its host has: a headless Service's host has one for each gateway."""
    try:
        parsed = URL(url)
        found = await asyncio.get_running_loop().getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    except ValueError as error:  # of URLs and of names that are none there is more than a schema refuses
        raise ScrapeError(f"{url} is no URL that can be asked: {error}") from error
    except OSError as error:
        raise ScrapeError(f"{url}: cannot resolve {parsed.host!r}: {error.strerror}") from error
    return [(url, address) for address in sorted({str(each[4][0]) for each in found})]


async def _scrape(session: aiohttp.ClientSession, url: str, address: str) -> Scrape:
    parsed = URL(url)
    target = parsed.with_host(address) if parsed.scheme == "http" else parsed
    try:
        async with session.get(target, headers={"Host": parsed.authority}, allow_redirects=False) as answer:
            if answer.status != 200:
                raise ScrapeError(f"{url} ({address}) answers with status {answer.status}")
            body = await answer.text(errors="replace")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ScrapeError(f"{url} ({address}): {error or 'no answer in time'}") from error
    return parse(body)
