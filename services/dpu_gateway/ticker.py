"""Ticks finer than an event loop's timers, which are rounded to milliseconds (uvloop takes half of one for none)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time

_TFD_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK  # the values of TFD_CLOEXEC and TFD_NONBLOCK
_NS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Interval(ctypes.Structure):
    _fields_ = (("period", _Timespec), ("first", _Timespec))


_libc = ctypes.CDLL(None, use_errno=True)


class Ticker:
    """A Linux timerfd in the running event loop, for one waiting coroutine.

    Ticks that come while nobody waits count as one: a busy loop catches up at once and never twice.
    """

    def __init__(self) -> None:
        self._fd = _checked(_libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_FLAGS))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._on_tick)
        self._microseconds = 0
        self._ticked = False
        self._waiter: asyncio.Future[None] | None = None

    def set_period(self, microseconds: int) -> None:
        """Tick this often from now on; free when it does not change."""
        if microseconds == self._microseconds:
            return
        self._microseconds = microseconds
        seconds, nanoseconds = divmod(microseconds * 1000, _NS)
        period = _Timespec(seconds, nanoseconds)
        _checked(_libc.timerfd_settime(self._fd, 0, ctypes.byref(_Interval(period, period)), None))

    async def wait(self) -> None:
        """Return at the next tick, at once when one came since the last call."""
        if not self._ticked:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._ticked = False

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _on_tick(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the period was changed meanwhile
            os.read(self._fd, 8)
        self._ticked = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
