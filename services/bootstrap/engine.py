"""From settings and a checkpoint to a running engine: the one place that knows which engines exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.bootstrap.errors import BootstrapError
from services.bootstrap.settings import BootstrapSettings
from services.gpu_engine.models.checkpoint import Checkpoint
from services.ring.memory import Region

Progress = Callable[[str, int, int], None]  # stage, done, total


class Engine(Protocol):
    """What bootstrap needs of an engine that holds its weights."""

    def run(self, on_ready: Callable[[], None]) -> None:
        """The control loop: READY, then ``on_ready``, then steps until the ring's Command is STOP."""


EngineBuilder = Callable[[BootstrapSettings, Checkpoint, int, Region, Progress], Engine]


def build_engine(
    settings: BootstrapSettings, checkpoint: Checkpoint, epoch: int, region: Region, progress: Progress
) -> Engine:
    """Load weights and allocate everything. Raises BlinkError."""
    raise BootstrapError(f"engine is {settings.engine!r}, which is not there yet")
