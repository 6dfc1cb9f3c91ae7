"""The main thread sleeps in the kernel until a signal says what to do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

ENGINE_ENDED = signal.SIGUSR1
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
SIGNALS = STOP_SIGNALS | {ENGINE_ENDED}
LOOK_SECONDS = 0.01  # between two looks at the engine while it drains


def park() -> signal.Signals:
    """Sleep until one of SIGNALS arrives, which must be blocked in every thread; returns it."""
    return signal.Signals(signal.sigwait(SIGNALS))


def wake_parked() -> None:
    """Tell the parked main thread that the engine's thread has ended."""
    os.kill(os.getpid(), ENGINE_ENDED)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether ``condition`` came true in time; another stop signal ends the wait early."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        info = signal.sigtimedwait(SIGNALS, LOOK_SECONDS)
        if info is not None and info.si_signo in STOP_SIGNALS:
            return condition()
    return True
