"""The processes of the load generator, as their parent sees them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from services.cli.bench.generator import Share, work
from services.cli.bench.target import Target
from services.cli.bench.workload import Request
from services.cli.errors import CommandError

LEAD_SECONDS = 0.1  # from the word to begin to time 0: every process has it by then


class Fleet:
    """Requests are dealt in turns, so that every process has the same load at any time."""

    def __init__(self, processes: Sequence[SpawnProcess], connections: Sequence[Connection]) -> None:
        self._processes, self._connections = processes, connections

    @property
    def size(self) -> int:
        return len(self._processes)

    def run(self, requests: Sequence[Request]) -> list[Share]:
        """Send all at their times, wait for all answers. Raises CommandError when a process is lost."""
        try:
            for index, connection in enumerate(self._connections):
                connection.send(requests[index :: self.size])
            for connection in self._connections:
                connection.recv()
            begins = time.monotonic() + LEAD_SECONDS
            for connection in self._connections:
                connection.send(begins)
            return [connection.recv() for connection in self._connections]
        except (EOFError, ConnectionError) as error:
            codes = [process.exitcode for process in self._processes]
            raise CommandError(f"a process of the load generator has ended, exit codes {codes}") from error


@contextmanager
def fleet(size: int, target: Target) -> Iterator[Fleet]:
    """``size`` processes on the CPUs of this one; they are gone on leaving."""
    context = multiprocessing.get_context("spawn")
    processes, connections = [], []
    try:
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, target), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        yield Fleet(processes, connections)
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.terminate()
            process.join()
