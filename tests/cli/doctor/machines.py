"""Machines that are not there, as file trees."""

from __future__ import annotations

from pathlib import Path

from services.cli.doctor.machine import Machine

GID_V4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
GID_LINK_LOCAL = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
RDMA_PORT = "sys/class/infiniband/mlx5_0/ports/1"

PLAIN = {
    "proc/sys/kernel/osrelease": "6.1.0-28-amd64",
    "proc/self/limits": "Max locked memory         8388608              8388608              bytes",
    "proc/self/status": "Name:\tblink\nCpus_allowed_list:\t0-7",
    "proc/meminfo": "MemTotal: 1 kB\nHugePages_Free:        0",
    "proc/net/tcp": "  sl  local_address rem_address   st\n   0: 0100007F:C382 00000000:0000 0A",
    "sys/devices/system/cpu/online": "0-7",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
    "sys/devices/system/node/node0/cpulist": "0-7",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force",
}
"""A laptop."""

SERVER = PLAIN | {
    "proc/self/limits": "Max locked memory         unlimited            unlimited            bytes",
    "proc/driver/nvidia/version": OPEN_DRIVER,
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [within_size] advise never deny force",
    "sys/devices/system/node/node1/cpulist": "8-15",
    f"{RDMA_PORT}/state": "4: ACTIVE",
    f"{RDMA_PORT}/link_layer": "Ethernet",
    f"{RDMA_PORT}/rate": "400 Gb/sec (4X NDR)",
    f"{RDMA_PORT}/gids/0": GID_LINK_LOCAL,
    f"{RDMA_PORT}/gids/1": GID_V4,
    f"{RDMA_PORT}/gids/2": GID_V4,
    f"{RDMA_PORT}/gid_attrs/types/0": "RoCE v2",
    f"{RDMA_PORT}/gid_attrs/types/1": "IB/RoCE v1",
    f"{RDMA_PORT}/gid_attrs/types/2": "RoCE v2",
    f"{RDMA_PORT}/gid_attrs/ndevs/2": "ens1f0",
    "sys/class/net/ens1f0/mtu": "9000",
    "sys/class/infiniband/mlx5_0/fw_ver": "32.39.2048",
    "sys/class/infiniband/mlx5_0/device/iommu_group/type": "identity",
    "usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0": "",
    "etc/libibverbs.d/mlx5.driver": "driver mlx5",
    "etc/libibverbs.d/rxe.driver": "driver rxe",
    "sys/class/infiniband/mlx5_0/device/numa_node": "1",
    "sys/bus/pci/devices/0000:81:00.0/vendor": "0x15b3",
    "sys/bus/pci/devices/0000:81:00.0/class": "0x020000",
    "sys/bus/pci/devices/0000:c1:00.0/vendor": "0x10de",
    "sys/bus/pci/devices/0000:c1:00.0/class": "0x030200",
    "sys/bus/pci/devices/0000:c1:00.0/numa_node": "1",
    "dev/rshim0/misc": "DISPLAY_LEVEL   0 (0:basic)\nBF_MODE         DPU mode\nBOOT_MODE 1",
}
"""A host with an H200 and a BlueField-3, all as it should be."""


def machine(root: Path, files: dict[str, str], modules: tuple[str, ...] = ("pyverbs",)) -> Machine:
    """Of ``files``, in a Python that can import ``modules``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return Machine(root, has_module=lambda name: name in modules)
