"""RDMA: pyverbs, devices, links, GIDs, and the mode of a BlueField."""

from __future__ import annotations

import ipaddress

from services.cli.doctor.finding import Finding, missing, ok, warn
from services.cli.doctor.machine import MELLANOX, Machine, Purpose

_NOT_NEEDED = "not needed for transport shm"
_ACTIVE = "ACTIVE"
_LARGE_PACKETS = 4200  # MTU of the interface for RoCE's largest packets: 4,096 bytes and headers
_BLUEFIELD_3, _FIRMWARE = "32", 39
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
    if purpose.transport == "shm":
        return [ok("RDMA device", f"{', '.join(machine.rdma_devices) or 'none'}, {_NOT_NEEDED}")]
    findings = [
        _port(machine, device, port)
        for device in machine.rdma_devices
        for port in machine.names(f"sys/class/infiniband/{device}/ports")
    ]
    if findings:
        return [*findings, *_usable(machine, findings), *_firmware(machine)]
    if machine.pci_devices(MELLANOX, "0x02"):
        advice = "a ConnectX or BlueField is there without a driver: modprobe mlx5_ib (Debian: linux-image-amd64)"
    else:
        advice = "no RDMA NIC: for a trial over Ethernet, modprobe rdma_rxe && rdma link add rxe0 type rxe netdev NAME"
    return [missing("RDMA device", "none", advice)]


def _usable(machine: Machine, ports: list[Finding]) -> list[Finding]:
    """What keeps every one of the devices from being used."""
    findings = []
    if not any(_ACTIVE in port.found for port in ports):
        findings.append(missing("RDMA link", "no port is ACTIVE", ports[0].advice))
    nodes = [
        f"dev/infiniband/{node}"
        for node in machine.names("sys/class/infiniband_verbs")
        if machine.read(f"sys/class/infiniband_verbs/{node}/ibdev") in machine.rdma_devices
    ]
    closed = [f"/{node}" for node in nodes if not machine.writable(node)]
    if closed and len(closed) == len(nodes):
        advice = (
            "in a container: --device /dev/infiniband, or the cluster's RDMA device plugin; else modprobe ib_uverbs, "
            "and let this user write to it (group rdma)"
        )
        findings.append(missing("RDMA access", f"{', '.join(closed)} not there or not writable", advice))
    return findings


def _firmware(machine: Machine) -> list[Finding]:
    """Of BlueField-3 cards, whose firmware has versions 32.N."""
    findings = []
    for device in machine.rdma_devices:
        version = machine.read(f"sys/class/infiniband/{device}/fw_ver")
        family, _, rest = version.partition(".")
        minor = rest.partition(".")[0]
        if family == _BLUEFIELD_3 and minor.isdecimal():
            advice = f"{_BLUEFIELD_3}.{_FIRMWARE} or newer: bfb-install, from the host, a BFB of DOCA 2.5 or newer"
            old = int(minor) < _FIRMWARE
            check = f"firmware of {device}"
            findings.append(warn(check, version, advice) if old else ok(check, version))
    return findings


def _port(machine: Machine, device: str, port: str) -> Finding:
    folder = f"sys/class/infiniband/{device}/ports/{port}"
    check = f"RDMA {device} port {port}"
    state = machine.read(f"{folder}/state").partition(": ")[2] or "unknown"
    layer = machine.read(f"{folder}/link_layer")
    rate = machine.read(f"{folder}/rate").partition(" (")[0]
    found = f"{layer}, {state}, {rate}"
    if state != _ACTIVE:
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
    found += f", GID index {', '.join(gids)}"
    interface = machine.read(f"{folder}/gid_attrs/ndevs/{gids[0]}")
    mtu = machine.read(f"sys/class/net/{interface}/mtu") if interface else ""
    if mtu.isdecimal() and int(mtu) < _LARGE_PACKETS:
        advice = f"ip link set {interface} mtu 9000, on the whole path: packets of 4,096 bytes instead of 1,024"
        return warn(check, f"{found}, MTU {mtu}", advice)
    return ok(check, found + (f", MTU {mtu}" if mtu else ""))


def _is_ipv4(gid: str) -> bool:
    try:
        return ipaddress.IPv6Address(gid).ipv4_mapped is not None
    except ValueError:
        return False


def check_bluefield(machine: Machine, purpose: Purpose) -> list[Finding]:
    """The mode of a BlueField, where this machine can see one and it matters."""
    check = "BlueField"
    if purpose.transport == "shm":
        return []
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
