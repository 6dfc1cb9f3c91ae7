"""Kernel, clock, processors."""

from __future__ import annotations

import re

from services.cli.doctor.finding import Finding, ok, warn
from services.cli.doctor.machine import Machine, Purpose

OLDEST_KERNEL = {"shm": (5, 10), "verbs": (5, 15)}
STEADY_CLOCKS = {"tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page"}


def check_kernel(machine: Machine, purpose: Purpose) -> Finding:
    release = machine.read("proc/sys/kernel/osrelease") or "unknown"
    oldest = OLDEST_KERNEL[purpose.transport]
    if machine.kernel < oldest:
        wanted = ".".join(map(str, oldest))
        return warn("kernel", release, f"Linux {wanted} or newer for transport {purpose.transport}; 6.1 is tested")
    return ok("kernel", release)


def check_clock(machine: Machine, _purpose: Purpose) -> Finding:
    source = machine.read("sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    if source not in STEADY_CLOCKS:
        advice = "reading it is slow: see dmesg for why the kernel gave up on tsc, or boot with clocksource=tsc"
        return warn("clock", source, advice)
    return ok("clock", source)


def check_affinity(machine: Machine, purpose: Purpose) -> Finding:
    status = re.search(r"^Cpus_allowed_list:\s+(\S+)", machine.read("proc/self/status"), re.MULTILINE)
    allowed = status[1] if status else "unknown"
    online = machine.read("sys/devices/system/cpu/online") or "unknown"
    governors = {
        machine.read(f"sys/devices/system/cpu/{name}/cpufreq/scaling_governor")
        for name in machine.names("sys/devices/system/cpu")
        if re.fullmatch(r"cpu\d+", name)
    } - {""}
    found = f"may use {allowed} of {online}" + (f", governor {', '.join(sorted(governors))}" if governors else "")
    if governors - {"performance"}:
        return warn("processors", found, "cpupower frequency-set -g performance: slow clocks cost latency")
    if purpose.transport == "verbs" and purpose.engine == "none" and "irqbalance" in _running(machine):
        advice = "systemctl disable --now irqbalance: it moves interrupts onto the workers' cores"
        return warn("processors", f"{found}, irqbalance runs", advice)
    return ok("processors", found)


def _running(machine: Machine) -> set[str]:
    """Names of this machine's processes."""
    return {machine.read(f"proc/{name}/comm") for name in machine.names("proc") if name.isdecimal()}


def check_numa(machine: Machine, purpose: Purpose) -> Finding:
    """Whether NIC and GPU hang on the same node."""
    check = "NUMA"
    nodes = [name for name in machine.names("sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    found = f"{len(nodes) or 1} node{'s' if len(nodes) > 1 else ''}"
    if len(nodes) < 2 or not purpose.gpu_memory:
        return ok(check, found)
    nics = {machine.read(f"sys/class/infiniband/{name}/device/numa_node") for name in machine.rdma_devices} - {""}
    gpus = {machine.read(f"sys/bus/pci/devices/{name}/numa_node") for name in machine.gpus}
    found += f"; RDMA devices on {_listed(nics)}, GPUs on {_listed(gpus)}"
    if not nics & gpus:
        advice = "choose a GPU and an RDMA device of the same node: traffic between sockets is slow"
        return warn(check, found, advice)
    return ok(check, found)


def _listed(nodes: set[str]) -> str:
    return ", ".join(sorted(nodes)) or "none"
