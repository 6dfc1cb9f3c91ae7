"""Ticks finer than an event loop's timers, which are rounded to milliseconds (uvloop takes half of one for none)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time

_TFD_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK  # the values of TFD_CLOEXEC and TFD_NONBLOCK
_NS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Interval(ctypes.Structure):
    _fields_ = (("period", _Timespec), ("first", _Timespec))


_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter lock: these calls never wait


class Ticker:
    """A Linux timerfd in the running event loop, for one waiting coroutine.

    Ticks that come while nobody waits count as one: a busy loop catches up at once and never twice.
    """

    def __init__(self) -> None:
        self._fd = _checked(_libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_FLAGS))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._on_tick)
        self._seconds = 0.0
        self._ticks = 0
        self._waiter: asyncio.Future[None] | None = None

    def set_period(self, seconds: float) -> None:
        """Tick this often from now on; free when it does not change."""
        if seconds == self._seconds:
            return
        self._seconds = seconds
        period = _Timespec(*divmod(int(seconds * _NS), _NS))
        _checked(_libc.timerfd_settime(self._fd, 0, ctypes.byref(_Interval(period, period)), None))

    async def wait(self) -> int:
        """Return at the next tick, at once when one came since the last call; how many came."""
        if not self._ticks:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        ticks, self._ticks = self._ticks, 0
        return ticks

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _on_tick(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the period was changed meanwhile
            self._ticks += int.from_bytes(os.read(self._fd, 8), sys.byteorder)
        if self._ticks and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
