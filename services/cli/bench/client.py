"""What a process of the load generator needs of a protocol's client."""

from __future__ import annotations

from typing import Any, Protocol

from services.cli.bench.outcome import Outcome
from services.cli.bench.workload import Request


class Client(Protocol):
    """Streams answers. ``prepare`` is called before the load begins, so that sending costs as little as it can."""

    def prepare(self, request: Request) -> Any:
        """What ``ask`` sends."""

    async def ask(self, prepared: Any, outcome: Outcome) -> None:
        """Send at once, fill in ``outcome``; raises nothing but for a fault of ours."""

    async def close(self) -> None:
        """Let go of all connections."""
