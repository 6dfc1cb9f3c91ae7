"""How late the kernel may wake the threads that are started meanwhile.

The NVIDIA driver starts a thread with each context that looks around ten times a second for as long as the process
lives, with or without work: 18 ms of CPU in 20 s on a virtual machine. It looks at time-outs alone, its events wake it
at once, so it may as well be woken late: with the next timer interrupt of its core that comes anyway.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_TIMERSLACK = 29
_OWN_DEFAULT = 0  # what the thread was started with


@contextmanager
def late_timers(seconds: float) -> Iterator[None]:
    """Threads started inside, by this one, may wake so much later than they ask for: PR_SET_TIMERSLACK of prctl(2).

    This thread may too, until the end. Where the kernel does not have it, nothing changes.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(int(seconds * 1e9)), 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_OWN_DEFAULT), 0, 0, 0)
