"""Memory: what may be locked, shared memory, huge pages."""

from __future__ import annotations

import re

from services.cli.doctor.finding import Finding, missing, ok, warn
from services.cli.doctor.machine import Machine, Purpose

RING_BYTES = 280 << 20  # of bootstrap's defaults: four lanes of 64 MiB of prompts and their logs
GATEWAY_BYTES = 4 << 20  # of one worker: what it writes from and reads into, and its queues
_IPC_LOCK = 1 << 14  # CAP_IPC_LOCK, which no limit holds
_EVERY_USER = "0 0 4294967295"  # the map of a process outside of every user namespace


def check_memlock(machine: Machine, purpose: Purpose) -> Finding:
    check = "memlock limit"
    match = re.search(r"^Max locked memory\s+(\S+)", machine.read("proc/self/limits"), re.MULTILINE)
    limit = match[1] if match else "unknown"
    gateway = purpose.engine == "none"
    what, needed = ("a gateway worker", GATEWAY_BYTES) if gateway else ("a ring of the default size", RING_BYTES)
    pinned = purpose.transport == "verbs" or purpose.engine == "cuda"
    if not pinned:
        return ok(check, f"{_amount(limit)}; nothing is locked for transport shm with the cpu engine")
    if limit.isdecimal() and _may_lock_anything(machine):
        return ok(check, f"{_amount(limit)}, which does not hold this user (CAP_IPC_LOCK)")
    if limit.isdecimal() and int(limit) < needed:
        advice = "ulimit -l unlimited; for good: LimitMEMLOCK=infinity (systemd), memlock in /etc/security/limits.conf"
        return missing(check, f"{_amount(limit)}, {what} takes {needed >> 20} MiB", advice)
    return ok(check, _amount(limit))


def _may_lock_anything(machine: Machine) -> bool:
    match = re.search(r"^CapEff:\s+([0-9a-f]+)", machine.read("proc/self/status"), re.MULTILINE)
    privileged = match is not None and bool(int(match[1], 16) & _IPC_LOCK)
    return privileged and machine.read("proc/self/uid_map").split() == _EVERY_USER.split()


def _amount(limit: str) -> str:
    return f"{int(limit) >> 20} MiB" if limit.isdecimal() else limit


def check_huge_pages(machine: Machine, purpose: Purpose) -> Finding:
    check = "huge pages"
    match = re.search(r"^HugePages_Free:\s+(\d+)", machine.read("proc/meminfo"), re.MULTILINE)
    free = int(match[1]) if match else 0
    mode = re.search(r"\[(\w+)\]", machine.read("sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    shared = mode[1] if mode else "unknown"
    found = f"{free} free; for shared memory: {shared}"
    if purpose.transport == "shm" or purpose.engine == "none" or shared in {"always", "within_size", "advise", "force"}:
        return ok(check, found)
    advice = (
        "fewer, larger pages for the NIC's translation cache: "
        "echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    )
    return warn(check, found, advice)
