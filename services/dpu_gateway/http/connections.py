"""How many HTTP connections may be open: a new one takes the place of the one that has been idle longest."""

from __future__ import annotations

from typing import Protocol


class Connection(Protocol):
    """What can be hung up on."""

    def hang_up(self) -> None:
        """Close, without an answer."""


class Connections:
    """At most ``most``. Idle is a connection whose request has not come whole; one that serves a request is never
    closed, so when all do, it is the newcomer who is turned away."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = 0
        self._idle: dict[Connection, None] = {}  # the longest idle one first

    def opened(self, connection: Connection) -> None:
        self._open += 1
        self._idle[connection] = None
        if self._open > self._most:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.hang_up()

    def busy(self, connection: Connection) -> None:
        """Its request has come."""
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """Its answer is sent."""
        self._idle[connection] = None

    def closed(self, connection: Connection) -> None:
        self._open -= 1
        self._idle.pop(connection, None)
