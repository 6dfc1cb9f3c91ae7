"""How often the worker looks at the token log, and how often it may write to one stream."""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW = 0.02  # seconds over which load is judged
HIGH_LOAD = 0.5
LOW_LOAD = 0.3
STEP = 1.5
FIRST_GAP = 0.002
REST = 0.95  # of the beat, after tokens came
LONGEST_REST = 0.01
BEAT_GROWTH = 1.05
PATIENCE = 0.05  # of what was waited for already, until the next look


class Cadence:
    """Adapts to the engine's beat and to the worker's own load. Times are in seconds.

    ``period`` until the next look. The engine publishes tokens once a step, so after some were found there is rest
    until shortly before the next step's are due; then looks come every ``fast``, so that tokens are seen that late at
    most. What is still not there after long is looked for less often, up to every ``slow``: a look is late by a small
    part of what was waited for. ``idle`` when no request is in the engine and nothing can come. A tick costs what
    waking a process costs, some tens of microseconds.

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
        self._beat = fast  # from tokens found to the next: the engine's steps, as the last of them came
        self._looked_at = self._found_at = self._awaited_since = clock()
        self._live = False
        self.period = fast
        self.gap = 0.0

    def after_look(self, *, found: bool, live: bool, late: bool) -> None:
        """``found``: there were new tokens; ``live``: requests are in the engine; ``late``: the tick of this look came
        late by a period or more."""
        now, self._live = self._clock(), live
        if found:
            # A step that had a prompt in it, or none of our streams, was longer: the next one may not be.
            self._beat = min(now - self._found_at, self._beat * BEAT_GROWTH)
            self._found_at = self._awaited_since = now
            # They may have come right after the last look. Who was late once and rested in full would stay late.
            rest = min(REST * self._beat, LONGEST_REST) - (now - self._looked_at)
            self.period = max(rest, self._slow if self.gap else self._fast)
        else:
            self.period = min(max(self._fast, PATIENCE * (now - self._awaited_since)), self._slow)
        if not live:
            self.period = self._idle
        self._looked_at = now
        self._looks += 1
        self._late += late
        elapsed = now - self._window_start
        if elapsed >= WINDOW:
            self._judge(elapsed)

    def hurry(self) -> None:
        """A request was submitted: its first token must not wait for a slow look, and comes with the beat if there is
        one."""
        now = self._clock()
        if not self._live or now - self._found_at > 2 * self._beat:
            self._live = True
            self._awaited_since = now
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
