"""What is measured around a load: the host's CPU time, the GPUs' energy, what neighbours moved."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from services.cli.bench.accounts import GpuEnergy, machine_cpu_seconds, tree_cpu_seconds
from services.cli.bench.neighbours import Neighbours
from services.cli.bench.report import Interference
from services.cli.errors import CommandError

LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1"}


class Account:
    """CPU time and energy of one stretch of time; complete when it is over."""

    def __init__(self, pids: Sequence[int], machine: bool, gpus: GpuEnergy) -> None:
        self._pids, self._machine, self._gpus = pids, machine, gpus
        self._cpu, self._own, self._joules = self._read()
        self.gpu_joules: float | None = None

    def end(self) -> None:
        cpu, own, joules = self._read()
        self._cpu, self._own = cpu - self._cpu, own - self._own
        self.gpu_joules = None if self._gpus.absent else joules - self._joules

    def host_cpu_seconds(self, client: float) -> float | None:
        """Of the given processes, or of the machine less the load generator: ``client`` seconds and this process."""
        if self._pids:
            return self._cpu
        return max(0.0, self._cpu - self._own - client) if self._machine else None

    def _read(self) -> tuple[float, float, float]:
        try:
            cpu = tree_cpu_seconds(self._pids) if self._pids else machine_cpu_seconds()
        except ProcessLookupError as error:
            raise CommandError(f"--pid: {error}") from error
        return cpu, time.process_time(), 0.0 if self._gpus.absent else self._gpus.joules()


class Beside:
    """What neighbours did while a point was measured; None without them."""

    seen: Interference | None = None


class Conditions:
    """What can be measured of the server's host. ``notes`` say what cannot, and why."""

    def __init__(self, address: str, pids: Sequence[int], gpus: Sequence[int], *, beside_neighbours: bool) -> None:
        local = _is_local(address)
        self._pids = tuple(pids)
        self._machine = local and not beside_neighbours
        self._energy = GpuEnergy(gpus)
        if not local and not self._energy.absent:
            self._energy.absent = "the server is on another machine"
        self.gpus = [] if self._energy.absent else self._energy.names
        self.notes: list[str] = []
        if not pids:
            what = "the whole machine's, less the load generator's"
            if not self._machine:
                why = "neighbours run" if local else "the server is on another machine"
                what = f"not measured: {why}, and no --pid was given"
            self.notes.append(f"Host CPU time is {what}.")
        if self._energy.absent:
            self.notes.append(f"No GPU energy: {self._energy.absent}.")

    @contextmanager
    def account(self) -> Iterator[Account]:
        """Account for what is done within. Raises CommandError when a process is gone."""
        account = Account(self._pids, self._machine, self._energy)
        yield account
        account.end()

    @contextmanager
    def interference(self, running: Neighbours | None, cpus: Collection[int]) -> Iterator[Beside]:
        """Note what the neighbours move meanwhile. Raises RuntimeError when one stood still."""
        beside = Beside()
        if running is None:
            yield beside
            return
        with running.measured() as rates:
            yield beside
        copy, update, walk = rates
        beside.seen = Interference(
            count=len(running.moved),
            cpus=sorted(cpus),
            copy_gb_per_s=copy,
            update_gb_per_s=update,
            walk_gb_per_s=walk,
        )


def _is_local(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    parts = urlsplit(address if "://" in address else f"//{address}")
    return parts.hostname in LOCAL_HOSTS
