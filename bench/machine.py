"""What a measurement was made on and with, and what energy the GPU took meanwhile."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.cpu import cpu_name


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
    """``results`` with the machine, if there is a file to write to; what is NaN becomes null."""
    if file is not None:
        whole = json.dumps({"bench": bench, "machine": asdict(Machine.of_this()), "results": results})
        valid = json.loads(whole, parse_constant=lambda _: None)
        file.write_text(json.dumps(valid, indent=1, allow_nan=False) + "\n")


class EnergyMeter:
    """The energy that GPU 0 has taken, by NVML's counter: exact over spans of many tenths of a second.

    Without nvidia-ml-py or such a counter all is NaN.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        with contextlib.suppress(ImportError):
            self._nvml: Any = importlib.import_module("pynvml")
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlInit()
                self._handle = self._nvml.nvmlDeviceGetHandleByIndex(0)

    def joules(self) -> float:
        """Since the driver was loaded."""
        if self._handle is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        return float("nan")
