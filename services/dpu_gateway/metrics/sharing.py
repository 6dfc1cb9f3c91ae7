"""Where workers keep their figures so that any of them can answer for all (docs/decisions/0013)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import values
from prometheus_client.metrics_core import Metric

from services.dpu_gateway.metrics.totals import totals

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class SharedFigures:
    """Files of one instance's workers, each written by one worker and read by whichever is scraped.

    A file is named after the worker's number and not its process: a worker that was killed and started again goes on
    counting where it was, so that a sum over workers never goes back.
    """

    def __init__(self, directory: Path, worker: int) -> None:
        self._directory = directory
        self._worker = worker

    @staticmethod
    def directory(runtime: Path, instance: str) -> Path:
        return runtime / f"metrics-{instance}"

    def open(self) -> None:
        """Have every metric made from now on in this process lie in this worker's files."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        os.environ[DIRECTORY_VARIABLE] = str(self._directory)
        values.ValueClass = values.MultiProcessValue(lambda: self._worker)  # type: ignore[no-untyped-call]

    def collect(self) -> Iterator[Metric]:
        """All workers' figures, added up."""
        return totals(sorted(self._directory.glob("*.db")))

    def remove(self) -> None:
        """This worker stops for good: take its figures away, and the directory with the last of them."""
        for path in self._directory.glob(f"*_{self._worker}.db"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are there still
            self._directory.rmdir()
