"""CPU time of the server's host, and energy, over a stretch of time."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PROC = Path("/proc")
TICK = 1 / os.sysconf("SC_CLK_TCK")
# Fields of a line of /proc/stat that are work of this machine: user, nice, system, irq, softirq (man proc_stat).
BUSY_FIELDS = (1, 2, 3, 6, 7)


def machine_cpu_seconds(proc: Path = PROC) -> float:
    """Of all processes and the kernel since the machine started."""
    fields = (proc / "stat").read_text().split("\n", 1)[0].split()
    return sum(int(fields[index]) for index in BUSY_FIELDS) * TICK


def tree_cpu_seconds(pids: Iterable[int], proc: Path = PROC) -> float:
    """Of these processes, their living descendants, and children that they waited for. Raises ProcessLookupError."""
    times: dict[int, float] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, fields in _processes(proc):
        children[int(fields[1])].append(pid)
        times[pid] = sum(map(int, fields[11:15])) * TICK  # utime, stime, cutime, cstime
    total, rest, seen = 0.0, list(pids), set[int]()
    for pid in rest:
        if pid not in times:
            raise ProcessLookupError(f"process {pid} is not there")
        if pid not in seen:
            seen.add(pid)
            total += times[pid]
            rest += children[pid]
    return total


def _processes(proc: Path) -> Iterator[tuple[int, Sequence[str]]]:
    """Ids, and the fields of their stat from the state on: names before it may hold anything."""
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it has ended
                yield int(folder.name), (folder / "stat").read_text().rpartition(")")[2].split()


class GpuEnergy:
    """Joules of NVIDIA GPUs, by NVML. ``absent`` says why there is none to read, and is empty when there is."""

    def __init__(self, indices: Sequence[int] = ()) -> None:
        self.absent = ""
        self.names: list[str] = []
        self._devices: list[Any] = []
        try:
            import pynvml  # noqa: PLC0415 - an optional extra
        except ImportError:
            self.absent = "nvidia-ml-py is not installed: pip install '.[bench]' in Blink's checkout"
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            wanted = indices or range(pynvml.nvmlDeviceGetCount())
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in wanted]
            self.names = [str(pynvml.nvmlDeviceGetName(device)) for device in self._devices]
            self.joules()
        except pynvml.NVMLError as error:
            self.absent = f"NVML: {error}"

    def joules(self) -> float:
        """Since the driver was loaded, of all its devices together."""
        return float(sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(device) for device in self._devices)) / 1e3
