"""Neighbours that are hostile to a machine's memory: ``python -m services.cli.bench.neighbours`` shows what they move.

Each is a process of its own that does one of three things without end, over arrays larger than any cache: copies
(fills the memory's bandwidth past the caches), updates in place (fills the caches with dirty lines) and walks (reads at
random places: every read a miss of cache and TLB). They count the bytes that they move, so that a measurement can show
that they ran.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.common.cpu import on_cpus
from services.ring.schema import LINE_BYTES

KINDS = ("copy", "update", "walk")
ARRAY_BYTES = 64 << 20
WALK_READS = 1 << 19  # a round
START_SECONDS = 60.0
Counters = NDArray[np.uint64]


class Neighbours:
    """The running processes.

    Attributes:
        moved: [count] bytes that each has moved, of its own accord ever growing.
    """

    def __init__(self, processes: list[subprocess.Popen[bytes]], moved: Counters) -> None:
        self._processes, self.moved = processes, moved

    def check(self) -> None:
        """Raises RuntimeError when one has ended."""
        ended = [process.pid for process in self._processes if process.poll() is not None]
        if ended:
            raise RuntimeError(f"neighbours {ended} have ended by themselves")

    @contextmanager
    def measured(self) -> Iterator[list[float]]:
        """Yields a list that at the end holds GB/s of each of KINDS. Raises RuntimeError when one stood still."""
        rates: list[float] = []
        before, began = self.moved.copy(), time.monotonic()
        yield rates
        moved = self.moved - before
        self.check()
        if not moved.all():
            raise RuntimeError(f"neighbours {np.flatnonzero(moved == 0).tolist()} moved nothing")
        seconds = time.monotonic() - began
        rates += (float(moved[kind :: len(KINDS)].sum()) / seconds / 1e9 for kind in range(len(KINDS)))


@contextmanager
def neighbours(count: int, cpus: Collection[int]) -> Iterator[Neighbours]:
    """``count`` processes on ``cpus``, all at work; ended and reaped on leaving."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "moved"
        moved = np.memmap(path, np.uint64, "w+", shape=(count,))
        command = [sys.executable, "-m", "services.cli.bench.neighbours", "--work", str(path), "--count", str(count)]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with on_cpus(cpus):
                for index in range(count):
                    indexed = [*command, "--index", str(index)]
                    processes.append(subprocess.Popen(indexed, env=environment))  # noqa: S603 (our own module)
            running = Neighbours(processes, np.asarray(moved))
            deadline = time.monotonic() + START_SECONDS
            while not running.moved.all():
                running.check()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"neighbours were not at work within {START_SECONDS:.0f} s")
                time.sleep(0.01)
            yield running
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


def work(path: Path, index: int, count: int) -> None:
    """One neighbour; ends with its parent."""
    moved = np.memmap(path, np.uint64, "r+", shape=(count,))
    act, moved_each = _action(KINDS[index % len(KINDS)])
    parent = os.getppid()
    while os.getppid() == parent:
        act()
        moved[index] += np.uint64(moved_each)


def _action(kind: str) -> tuple[Callable[[], object], int]:
    """One round, and the bytes that it moves between cores and memory."""
    array = np.ones(ARRAY_BYTES // 8)
    if kind == "copy":
        other = np.ones_like(array)
        return lambda: np.copyto(other, array), 2 * array.nbytes
    if kind == "update":
        return lambda: np.add(array, 1.0, out=array), 2 * array.nbytes
    places = np.random.default_rng().integers(0, array.size, WALK_READS)
    found = np.empty(WALK_READS)
    return lambda: np.take(array, places, out=found, mode="clip"), WALK_READS * (LINE_BYTES + 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3 * len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments.work, arguments.index, arguments.count)
        return
    with neighbours(arguments.count, os.sched_getaffinity(0)) as running:
        with running.measured() as rates:
            time.sleep(arguments.seconds)
        for kind, rate in zip(KINDS, rates, strict=True):
            print(f"{kind:6} {rate:7.1f} GB/s")


if __name__ == "__main__":
    main()
