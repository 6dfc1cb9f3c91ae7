"""RDMA: pyverbs, devices, links, GIDs, and the mode of a BlueField."""

from __future__ import annotations

import ipaddress

from services.cli.doctor.finding import Finding, missing, ok, warn
from services.cli.doctor.machine import MELLANOX, Machine, Purpose

_NOT_NEEDED = "not needed for transport shm"
_DEBIAN_PACKAGES = "usr/lib/python3/dist-packages"


def check_pyverbs(machine: Machine, purpose: Purpose) -> Finding:
    if machine.has_module("pyverbs"):
        return ok("pyverbs", "importable")
    if purpose.transport == "shm":
        return ok("pyverbs", f"none, {_NOT_NEEDED}")
    if machine.exists(f"{_DEBIAN_PACKAGES}/pyverbs"):
        advice = f"let the venv see it: echo /{_DEBIAN_PACKAGES} > .venv/lib/python3.*/site-packages/debian.pth"
        return missing("pyverbs", "installed, but this Python does not see it", advice)
    return missing("pyverbs", "not installed", "apt-get install python3-pyverbs ibverbs-providers")


def check_devices(machine: Machine, purpose: Purpose) -> list[Finding]:
    """One finding for each port of each device, or one that there is none."""
    findings = [
        _port(machine, device, port)
        for device in machine.rdma_devices
        for port in machine.names(f"sys/class/infiniband/{device}/ports")
    ]
    if findings:
        return findings
    if purpose.transport == "shm":
        return [ok("RDMA device", f"none, {_NOT_NEEDED}")]
    if machine.pci_devices(MELLANOX, "0x02"):
        advice = "a ConnectX or BlueField is there without a driver: modprobe mlx5_ib (Debian: linux-image-amd64)"
    else:
        advice = "no RDMA NIC: for a trial over Ethernet, modprobe rdma_rxe && rdma link add rxe0 type rxe netdev NAME"
    return [missing("RDMA device", "none", advice)]


def _port(machine: Machine, device: str, port: str) -> Finding:
    folder = f"sys/class/infiniband/{device}/ports/{port}"
    check = f"RDMA {device} port {port}"
    state = machine.read(f"{folder}/state").partition(": ")[2] or "unknown"
    layer = machine.read(f"{folder}/link_layer")
    rate = machine.read(f"{folder}/rate").partition(" (")[0]
    found = f"{layer}, {state}, {rate}"
    if state != "ACTIVE":
        return warn(check, found, "bring the link up: cable, switch port, ip link set ... up")
    if layer != "Ethernet":
        return ok(check, found)
    gids = [
        index
        for index in machine.names(f"{folder}/gids")
        if machine.read(f"{folder}/gid_attrs/types/{index}") == "RoCE v2"
        and _is_ipv4(machine.read(f"{folder}/gids/{index}"))
    ]
    if not gids:
        return warn(check, f"{found}, no GID of RoCE v2 over IPv4", "give its network interface an IPv4 address")
    return ok(check, f"{found}, GID index {', '.join(gids)}")


def _is_ipv4(gid: str) -> bool:
    try:
        return ipaddress.IPv6Address(gid).ipv4_mapped is not None
    except ValueError:
        return False


def check_bluefield(machine: Machine, _purpose: Purpose) -> list[Finding]:
    """The mode of a BlueField, where this machine can see one."""
    check = "BlueField"
    if machine.on_bluefield:
        representors = [name for name in machine.names("sys/class/net") if name.startswith("pf") and "hpf" in name]
        if representors:
            return [ok(check, f"its Arm side, DPU mode: the host's ports are {', '.join(representors)}")]
        return [
            warn(
                check,
                "its Arm side, without representors of the host's ports: NIC mode",
                "mlxconfig -d DEVICE set INTERNAL_CPU_OFFLOAD_ENGINE=0, then power cycle (docs/rdma.md)",
            )
        ]
    findings = []
    for name in machine.names("dev"):
        if name.startswith("rshim"):
            mode = _rshim_mode(machine.read(f"dev/{name}/misc"))
            advice = "set DPU mode for a gateway on its Arm cores (docs/rdma.md)"
            found = f"the host of one ({name}), {mode}"
            findings.append(warn(check, found, advice) if mode.startswith("NIC") else ok(check, found))
    return findings


def _rshim_mode(misc: str) -> str:
    for line in misc.splitlines():
        name, _, rest = line.partition(" ")
        if name == "BF_MODE":
            return rest.strip()
    return "mode not told by this rshim driver"
