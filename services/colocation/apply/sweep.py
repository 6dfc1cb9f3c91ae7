"""Has the store forget what went while nobody watched.

A watch that was away for too long (an API server that restarted) begins anew with a list of what there is, and no
word of what there is no more: a node or a pod would stay in the books for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from services.colocation.apply.api import Api
from services.colocation.observe.store import Store
from services.common.logging import get_logger

FIRST_RETRY_SECONDS = 5.0


class Sweep:
    """Compares the store with the API server's lists of names, every ``seconds``.

    A list of all pods is the largest thing that the operator asks for: where one fails, the next try comes after
    FIRST_RETRY_SECONDS, then after twice as long, up to ``seconds``.
    """

    def __init__(self, api: Api, store: Store, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._store = store
        self._seconds = seconds
        self._clock = clock
        self._retry = min(FIRST_RETRY_SECONDS, seconds)
        self._next = clock() + seconds

    async def when_due(self) -> None:
        """Raises one of CALL_ERRORS, to be tried again."""
        if self._clock() < self._next:
            return
        try:
            await self._compare()
        except BaseException:
            self._next = self._clock() + self._retry
            self._retry = min(2 * self._retry, self._seconds)
            raise
        self._next = self._clock() + self._seconds
        self._retry = min(FIRST_RETRY_SECONDS, self._seconds)

    async def _compare(self) -> None:
        for plural in self._api.WATCHED:
            present, version = await self._api.names(plural)
            gone = self._store.retain(plural, present, version)
            if gone:
                get_logger().warning("swept", kind=plural, gone=gone)
