"""What the emulated machine is made of: Debian packages, downloaded and unpacked in a cache, never installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("busybox-static", "iproute2", "python3-minimal", "python3-pyverbs", "ibverbs-providers", "libstdc++6")
_PREPARED_AS = f"2, by Python {sys.version_info.major}.{sys.version_info.minor}"  # changes with what prepare does
KERNEL = "linux-image-amd64"  # linux-image-cloud-amd64 has no rdma_rxe


class MachineUnavailableError(Exception):
    """The emulated machine can't be made or started here; the message says what is missing."""


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "blink" / "rdma-vm"


def unpacked(prepare: Callable[[Path], None]) -> Path:
    """A folder with the newest kernel and packages that apt knows of, unpacked; made when it is not there yet.

    ``prepare`` is given a new one before it is used.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise MachineUnavailableError(f"the emulated machine is made of Debian packages: {tool} is missing")
    archives = _closure()
    key = hashlib.sha256("\n".join([*archives, _PREPARED_AS]).encode()).hexdigest()[:16]
    folder = cache_folder() / f"root-{key}"
    if folder.exists():
        return folder
    scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
    downloads = scratch / "archives"
    downloads.mkdir(parents=True)
    try:
        _call("apt-get", "download", "-qq", *archives, cwd=downloads)
        for archive in sorted(downloads.iterdir()):
            _call("dpkg-deb", "--extract", str(archive), str(scratch))
        shutil.rmtree(downloads)
        prepare(scratch)
        for old in cache_folder().glob("root-*"):
            if old != scratch:
                shutil.rmtree(old, ignore_errors=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _closure() -> list[str]:
    """``name=version`` of PACKAGES with all that they depend on, as if nothing were installed, and of the kernel."""
    nothing_installed = ("-o", "Dir::State::status=/dev/null", "-o", "APT::Install-Recommends=false")
    plan = _call("apt-get", *nothing_installed, "-o", "Debug::NoLocking=1", "-s", "install", *PACKAGES)
    archives = [
        f"{name}={version.lstrip('(')}"
        for action, name, version, *_ in (line.split() for line in plan.splitlines() if line.startswith("Inst "))
    ]
    kernels = [line.split()[1] for line in _call("apt-cache", "depends", KERNEL).splitlines() if "Depends: " in line]
    if not archives or not kernels:
        raise MachineUnavailableError(f"apt knows no {KERNEL} or no {', '.join(PACKAGES)}: run apt-get update")
    return [*sorted(archives), kernels[0]]


def _call(*command: str, cwd: Path | None = None) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=300)
    if result.returncode:
        raise MachineUnavailableError(f"{' '.join(command[:2])} failed: {result.stderr.strip()[-500:]}")
    return result.stdout
