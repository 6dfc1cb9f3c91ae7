"""Which slots of the lane are free: a local cache, refilled by one bulk read of the slot statuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt

from services.ring.schema import SlotPhase

StatusReader = Callable[[], Awaitable[npt.NDArray[np.uint64]]]


class SlotTracker:
    """Hands out slots in constant time.

    A slot that ended is not reused at once: the engine must have let go of it, which its status word says. Ended slots
    gather, and only when the cache is empty one bulk read moves all those that are free back into it. So the read is
    paid once for at least one ended request, and not at all when nothing has ended. Who comes while it is under way
    waits for the same read.

    ``read_statuses`` returns the [slots] uint64 status words, without holding up the event loop.
    """

    def __init__(self, slots: int, read_statuses: StatusReader) -> None:
        self.slots = slots
        self._read_statuses = read_statuses
        self._free = list(range(slots - 1, -1, -1))
        self._ended: dict[int, int] = {}  # slot -> tag of the submission that ended in it
        self._refreshing = asyncio.Lock()

    @property
    def available(self) -> int:
        """Slots without a live request, whether or not the engine has let go of them yet."""
        return len(self._free) + len(self._ended)

    async def take(self) -> int | None:
        """A free slot, or None when every slot is in use. Raises RingError when the lane is lost."""
        if not self._free and self._ended:
            async with self._refreshing:
                if not self._free and self._ended:  # nobody before us found one
                    await self._refresh()
        return self._free.pop() if self._free else None

    def ended(self, slot: int, tag: int) -> None:
        """The submission ``tag`` in ``slot`` has finished."""
        self._ended[slot] = tag

    def untake(self, slot: int) -> None:
        """Give back a slot in which nothing was submitted."""
        self._free.append(slot)

    async def _refresh(self) -> None:
        count = len(self._ended)
        slots = np.fromiter(self._ended.keys(), np.intp, count)  # as of now: the read knows nothing of later ones
        tags = np.fromiter(self._ended.values(), np.uint64, count)
        words = (await self._read_statuses())[slots]
        phase = (words >> np.uint64(16)) & np.uint64(0xFFFF)
        let_go = (phase == SlotPhase.FREE) & ((words >> np.uint64(32)) == tags)
        for slot in slots[let_go].tolist():
            del self._ended[slot]
            self._free.append(slot)
