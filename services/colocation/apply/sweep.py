"""Has the store forget what went while nobody watched.

A watch that was away for too long (an API server that restarted) begins anew with a list of what there is, and no
word of what there is no more: a node or a pod would stay in the books for ever.
"""

from __future__ import annotations

import time

from services.colocation.apply.api import Api
from services.colocation.observe.store import Store
from services.common.logging import get_logger


class Sweep:
    """Compares the store with the API server's lists of names, every ``seconds``."""

    def __init__(self, api: Api, store: Store, seconds: float) -> None:
        self._api = api
        self._store = store
        self._seconds = seconds
        self._next = time.monotonic() + seconds

    async def when_due(self) -> None:
        """Raises one of CALL_ERRORS, to be tried again."""
        if time.monotonic() < self._next:
            return
        for plural in self._api.WATCHED:
            present, version = await self._api.names(plural)
            gone = self._store.retain(plural, present, version)
            if gone:
                get_logger().warning("swept", kind=plural, gone=gone)
        self._next = time.monotonic() + self._seconds
