"""What a measurement was made on and with, and what power the GPU took meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

SAMPLE_MS = 20


@dataclass(frozen=True)
class Machine:
    """Each is "unknown" where it can't be found out."""

    gpu: str
    driver: str
    cpus: str
    commit: str

    @classmethod
    def of_this(cls) -> Machine:
        answer = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        gpu, _, driver = answer.partition("\n")[0].partition(", ")
        return cls(gpu or "unknown", driver or "unknown", f"{os.cpu_count()} x {cpu_name()}", commit())


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def commit() -> str:
    """Of this tree; the variable BLINK_COMMIT where the tree has come without its history."""
    return os.environ.get("BLINK_COMMIT") or _output("git", "describe", "--always", "--dirty") or "unknown"


def _output(*command: str) -> str:
    with contextlib.suppress(OSError):
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return found.stdout.strip()
    return ""


def write_json(file: Path | None, bench: str, results: Mapping[str, Any]) -> None:
    """``results`` with the machine, if there is a file to write to."""
    if file is not None:
        whole = {"bench": bench, "machine": asdict(Machine.of_this()), "results": results}
        file.write_text(json.dumps(whole, indent=1) + "\n")


@dataclass
class Power:
    """Of GPU 0 over a span of time; means are NaN when there was no sample.

    Attributes:
        watts: the samples, of the last tens of milliseconds each.
        clocks: MHz of the multiprocessors, at the same times.
    """

    watts: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)

    def parse(self, text: str) -> None:
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # the last line may be cut off
                watts, clock = map(float, line.split(","))
                self.watts.append(watts)
                self.clocks.append(clock)

    def mean_watts(self, skipped: float = 0.0) -> float:
        """Without the first part of the samples, which may show what was before."""
        return _mean(self.watts[int(skipped * len(self.watts)) :])

    def mean_clock(self, skipped: float = 0.0) -> float:
        return _mean(self.clocks[int(skipped * len(self.clocks)) :])


def _mean(values: list[float]) -> float:
    return fmean(values) if values else float("nan")


@contextmanager
def power_sampled(interval_ms: int = SAMPLE_MS) -> Iterator[Power]:
    """The power taken inside, complete afterwards. NVML's, by way of nvidia-smi: a process of its own samples it."""
    query = "--query-gpu=power.draw.instant,clocks.sm"
    command = ["nvidia-smi", "-i", "0", query, "--format=csv,noheader,nounits", "-lms", str(interval_ms)]
    power = Power()
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:  # a machine without nvidia-smi
        yield power
        return
    with process:
        try:
            yield power
        finally:
            process.terminate()
            power.parse(process.communicate()[0])
