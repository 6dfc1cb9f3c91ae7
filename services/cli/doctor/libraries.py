"""rdma-core: its version, and the user-space drivers without which no program sees a device."""

from __future__ import annotations

import re

from services.cli.doctor.finding import Finding, missing, ok, warn
from services.cli.doctor.machine import Machine, Purpose

OLDEST = 44  # of rdma-core; Debian 12's, the one that is tested
_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64")
_INSTALL = "apt-get install ibverbs-providers"


def check_rdma_core(machine: Machine, purpose: Purpose) -> Finding:
    check = "rdma-core"
    version = _version(machine)
    found = f"version {version}" if version else "none"
    if purpose.transport == "shm":
        return ok(check, found if version else "none, not needed for transport shm")
    if not version:
        return missing(check, "no libibverbs", _INSTALL)
    drivers = [name.removesuffix(".driver") for name in machine.names("etc/libibverbs.d")]
    lacking = sorted(
        device for device in machine.rdma_devices if drivers and _driver(machine, device) not in {*drivers, ""}
    )
    if not drivers or lacking:
        whose = f" of {', '.join(lacking)}" if lacking else ""
        return missing(check, f"{found}, without the user-space driver{whose}", _INSTALL)
    if version < OLDEST:
        return warn(check, found, f"{OLDEST} or newer: {_INSTALL} of a newer distribution, or NVIDIA's DOCA-Host")
    return ok(check, f"{found}, drivers {', '.join(drivers)}")


def _version(machine: Machine) -> int:
    """The library's file carries it: libibverbs.so.1.14.44.0 is of version 44; 0 when there is none."""
    names = (name for folder in _FOLDERS for name in machine.names(folder))
    matches = (re.fullmatch(r"libibverbs\.so\.1\.\d+\.(\d+)\.\d+", name) for name in names)
    return max((int(match[1]) for match in matches if match), default=0)


def _driver(machine: Machine, device: str) -> str:
    """Name of its user-space driver, by how the kernel names its devices; empty when that tells nothing."""
    match = re.match(r"(mlx4|mlx5|rxe|siw|irdma|bnxt_re|efa|hns|qedr|erdma|mana)", device)
    return match[1] if match else ""
