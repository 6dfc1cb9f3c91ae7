"""How often the worker looks at the token log, and how often it may write to one stream."""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW = 0.02  # seconds over which load is judged
HIGH_LOAD = 0.5
LOW_LOAD = 0.3
STEP = 1.5
FIRST_GAP = 0.002


class Cadence:
    """Adapts to the flow of tokens and to the worker's own load. Times are in seconds.

    ``period`` until the next look: ``fast`` while tokens flow, then longer by and by, up to ``slow``; ``idle`` when no
    request is in the engine and nothing can come. A tick costs what waking a process costs, some tens of microseconds.

    ``gap`` between two chunks of one stream: 0 while the worker keeps up. A chunk costs far more than the tokens in it
    (one system call, one wake-up), so when the event loop is busy for more than half of the time, or comes late to more
    than half of its ticks because the machine is, the gap grows until it is not, up to ``longest_gap``. First tokens
    and ends of streams never wait for it.
    """

    def __init__(
        self,
        *,
        fast: float,
        slow: float,
        idle: float,
        longest_gap: float,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._fast = fast
        self._slow = slow
        self._idle = idle
        self._longest_gap = longest_gap
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._window_start, self._window_cpu = clock(), cpu_clock()
        self._looks = self._late = 0
        self.period = fast
        self.gap = 0.0

    def after_look(self, *, found: bool, live: bool, late: bool) -> None:
        """``found``: there were new entries; ``live``: requests are in the engine; ``late``: the tick of this look came
        late by a period or more."""
        if not live:
            self.period = self._idle
        elif found:
            self.period = self._slow if self.gap else self._fast
        else:
            self.period = min(self._slow, self.period * STEP)
        self._looks += 1
        self._late += late
        elapsed = self._clock() - self._window_start
        if elapsed >= WINDOW:
            self._judge(elapsed)

    def hurry(self) -> None:
        """A request was submitted: its first token must not wait for a slow look."""
        self.period = self._fast

    def _judge(self, elapsed: float) -> None:
        cpu = self._cpu_clock()
        load = max((cpu - self._window_cpu) / elapsed, self._late / self._looks)
        if load > HIGH_LOAD:
            self.gap = min(self._longest_gap, max(FIRST_GAP, self.gap * STEP))
        elif load < LOW_LOAD:
            self.gap = self.gap / STEP if self.gap > FIRST_GAP else 0.0
        self._window_start, self._window_cpu = self._clock(), cpu
        self._looks = self._late = 0
