"""When a pool takes tenants."""

from __future__ import annotations

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from services.colocation.decision.model import Pool, Window


def is_open(pool: Pool, now: datetime) -> bool:
    """Whether ``now`` lies in one of the pool's windows, by the clocks of its time zone. A pool without any is open."""
    if not pool.windows:
        return True
    local = now.astimezone(ZoneInfo(pool.time_zone))
    return any(_within(window, local) for window in pool.windows)


def _within(window: Window, local: datetime) -> bool:
    today, clock = local.weekday(), local.time()
    if window.start < window.end:
        return today in window.days and window.start <= clock < window.end
    yesterday = (local - timedelta(days=1)).weekday()
    return (today in window.days and clock >= window.start) or (yesterday in window.days and clock < window.end)
