"""What the kernel says of a machine, read from files alone so that tests can have machines that are not there."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MELLANOX = "0x15b3"
NVIDIA = "0x10de"


@dataclass(frozen=True)
class Purpose:
    """How Blink is to run here. What that does not need is never missing."""

    transport: Literal["shm", "verbs"] = "shm"
    engine: Literal["cpu", "cuda", "none"] = "cpu"  # none: gateways only
    listen: str = "127.0.0.1:50051"  # where clients call by gRPC; empty: not here
    http: str = "127.0.0.1:8000"  # and by HTTP

    @property
    def gpu_memory(self) -> bool:
        """Whether a NIC of this machine is to reach a GPU of this machine."""
        return self.transport == "verbs" and self.engine == "cuda"


def has_module(name: str) -> bool:
    """Whether this Python can import it."""
    return importlib.util.find_spec(name) is not None


class Machine:
    """The file tree below ``root``, which has /proc, /sys and /dev; whatever is missing reads as empty."""

    def __init__(self, root: Path = Path("/"), has_module: Callable[[str], bool] = has_module) -> None:
        self._root = root
        self.has_module = has_module

    def read(self, path: str) -> str:
        """Contents without surrounding blanks."""
        try:
            return (self._root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """Entries of a folder, sorted."""
        try:
            return sorted(entry.name for entry in (self._root / path).iterdir())
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return (self._root / path).exists()

    def writable(self, path: str) -> bool:
        """Whether it is there and this process may write to it."""
        return os.access(self._root / path, os.W_OK)

    @property
    def kernel(self) -> tuple[int, int]:
        """Version; (0, 0) when it can't be read."""
        match = re.match(r"(\d+)\.(\d+)", self.read("proc/sys/kernel/osrelease"))
        return (int(match[1]), int(match[2])) if match else (0, 0)

    @property
    def rdma_devices(self) -> list[str]:
        return self.names("sys/class/infiniband")

    @property
    def on_bluefield(self) -> bool:
        """Whether this is the Arm side of a BlueField."""
        return "bluefield" in self.read("sys/class/dmi/id/product_name").lower()

    def pci_devices(self, vendor: str, class_prefix: str) -> list[str]:
        """Addresses of PCI functions, by hexadecimal vendor and the beginning of their class."""
        folder = "sys/bus/pci/devices"
        return [
            name
            for name in self.names(folder)
            if self.read(f"{folder}/{name}/vendor") == vendor
            and self.read(f"{folder}/{name}/class").startswith(class_prefix)
        ]

    @property
    def gpus(self) -> list[str]:
        """NVIDIA's 3D and display controllers."""
        return self.pci_devices(NVIDIA, "0x03")
