"""Which of the lane's requests the engine has not admitted yet, and which of them gives way when there is no room."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.ring.schema import MIN_PRIORITY


class Waiting:
    """One entry for each slot. ``victim`` looks at all slots at once, and only when a request finds no room."""

    def __init__(self, slots: int) -> None:
        self._waits = np.zeros(slots, bool)
        self._priority = np.zeros(slots, np.int8)
        self._position = np.zeros(slots, np.int64)  # of the submission: grows from one to the next

    def add(self, slot: int, position: int, priority: int) -> None:
        """The slot's request was submitted."""
        self._waits[slot], self._priority[slot], self._position[slot] = True, priority, position

    def remove(self, slot: int) -> None:
        """It was admitted, has ended, or gives way already."""
        self._waits[slot] = False

    def below(self, priority: int) -> npt.NDArray[np.intp]:
        """The slots of all whose priority is below ``priority``."""
        if priority == MIN_PRIORITY:
            return np.zeros(0, np.intp)
        return np.flatnonzero(self._waits & (self._priority < priority))

    def victim(self, priority: int) -> int | None:
        """The slot of the newest request of the lowest priority, if that is below ``priority``."""
        slots = self.below(priority)
        if not slots.size:
            return None
        return int(slots[np.lexsort((-self._position[slots], self._priority[slots]))[0]])
