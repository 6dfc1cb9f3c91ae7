"""What `blink doctor` says of machines: a good one, and ones that lack one thing each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from services.cli.doctor.doctor import doctor, examine, purpose_of
from services.cli.doctor.finding import Finding, Level
from services.cli.doctor.machine import Machine, Purpose
from services.cli.errors import CommandError
from tests.cli.doctor.machines import OPEN_DRIVER, PLAIN, RDMA_PORT, SERVER, machine
from tests.cli.run_blink import blink

LAPTOP = Purpose()
HOST = Purpose("verbs", "cuda")
DPU = Purpose("verbs", "none")


def named(findings: list[Finding], check: str) -> Finding:
    (finding,) = [finding for finding in findings if finding.check == check]
    return finding


def test_a_laptop_lacks_nothing_for_shared_memory(tmp_path: Path) -> None:
    levels = {finding.level for finding in examine(machine(tmp_path, PLAIN, modules=()), LAPTOP)}
    assert levels == {Level.OK}


def test_a_host_as_it_should_be_is_all_well_and_every_check_says_what_it_saw(tmp_path: Path) -> None:
    findings = list(examine(machine(tmp_path, SERVER), HOST))
    assert [finding for finding in findings if finding.level is not Level.OK] == []
    assert named(findings, "RDMA mlx5_0 port 1").found == "Ethernet, ACTIVE, 400 Gb/sec, GID index 2, MTU 9000"
    assert named(findings, "rdma-core").found == "version 44, drivers mlx5, rxe"
    assert named(findings, "firmware of mlx5_0").found == "32.39.2048"
    assert named(findings, "IOMMU").found == "identity"
    assert named(findings, "BlueField").found == "the host of one (rshim0), DPU mode"
    assert named(findings, "NVIDIA driver").found == "580.95, open kernel module"
    assert named(findings, "GPU memory by RDMA").found == "dma-buf"
    assert named(findings, "NUMA").found == "2 nodes; RDMA devices on 1, GPUs on 1"


@pytest.mark.parametrize(
    ("change", "check", "level", "words"),
    [
        ({"proc/sys/kernel/osrelease": "5.14.0"}, "kernel", Level.WARN, "5.15 or newer for transport verbs"),
        ({f"{RDMA_PORT}/state": "1: DOWN"}, "RDMA mlx5_0 port 1", Level.WARN, "bring the link up"),
        ({f"{RDMA_PORT}/state": "1: DOWN"}, "RDMA link", Level.MISSING, "no port is ACTIVE"),
        ({"sys/class/net/ens1f0/mtu": "1500"}, "RDMA mlx5_0 port 1", Level.WARN, "ip link set ens1f0 mtu 9000"),
        ({"sys/class/infiniband/mlx5_0/fw_ver": "32.36.1010"}, "firmware of mlx5_0", Level.WARN, "32.39 or newer"),
        (
            {"sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0"},
            "RDMA access",
            Level.MISSING,
            "/dev/infiniband/uverbs0",
        ),
        ({"usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0": None}, "rdma-core", Level.MISSING, "no libibverbs"),
        (
            {
                "usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0": None,
                "usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.39.0": "",
            },
            "rdma-core",
            Level.WARN,
            "44 or newer",
        ),
        ({"etc/libibverbs.d/mlx5.driver": None}, "rdma-core", Level.MISSING, "user-space driver of mlx5_0"),
        (
            {"etc/libibverbs.d/mlx5.driver": None, "etc/libibverbs.d/rxe.driver": None},
            "rdma-core",
            Level.MISSING,
            "apt-get install ibverbs-providers",
        ),
        ({"sys/class/infiniband/mlx5_0/device/iommu_group/type": "DMA-FQ"}, "IOMMU", Level.WARN, "boot with iommu=pt"),
        ({f"{RDMA_PORT}/gid_attrs/types/2": "IB/RoCE v1"}, "RDMA mlx5_0 port 1", Level.WARN, "IPv4 address"),
        ({f"{RDMA_PORT}/link_layer": "InfiniBand"}, "RDMA mlx5_0 port 1", Level.OK, "InfiniBand, ACTIVE"),
        ({"proc/driver/nvidia/version": ""}, "NVIDIA driver", Level.MISSING, "1 GPU seen on the bus"),
        (
            {"proc/driver/nvidia/version": OPEN_DRIVER.replace("580", "550")},
            "NVIDIA driver",
            Level.MISSING,
            "CUDA 13 needs 580 or newer",
        ),
        (
            {"proc/driver/nvidia/version": OPEN_DRIVER.replace("Open Kernel", "x86_64 Kernel")},
            "GPU memory by RDMA",
            Level.WARN,
            "set ring_memory = host",
        ),
        (
            {"proc/sys/kernel/osrelease": "5.10.0", "sys/module/nvidia_peermem/version": "580"},
            "GPU memory by RDMA",
            Level.WARN,
            "nvidia-peermem, which Blink does not use",
        ),
        ({"proc/self/limits": PLAIN["proc/self/limits"]}, "memlock limit", Level.MISSING, "8 MiB, a ring of"),
        (
            {"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [never]"},
            "huge pages",
            Level.WARN,
            "echo within_size",
        ),
        ({"sys/bus/pci/devices/0000:c1:00.0/numa_node": "0"}, "NUMA", Level.WARN, "of the same node"),
        (
            {"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"},
            "clock",
            Level.WARN,
            "clocksource=tsc",
        ),
        (
            {"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave"},
            "processors",
            Level.WARN,
            "cpupower frequency-set",
        ),
        ({"dev/rshim0/misc": "BF_MODE  NIC mode"}, "BlueField", Level.WARN, "set DPU mode"),
        ({"dev/rshim0/misc": "BOOT_MODE 1"}, "BlueField", Level.OK, "mode not told"),
    ],
)
def test_one_thing_that_is_wrong_is_found_with_what_to_do(
    tmp_path: Path, change: dict[str, str | None], check: str, level: Level, words: str
) -> None:
    """None takes a file away."""
    changed = SERVER | {"proc/net/tcp": "sl"} | change
    files = {name: text for name, text in changed.items() if text is not None}
    finding = named(list(examine(machine(tmp_path, files), HOST)), check)
    assert finding.level is level
    assert words in f"{finding.found} {finding.advice}"
    assert bool(finding.advice) is (level is not Level.OK)


def test_missing_rdma_parts_are_told_apart(tmp_path: Path) -> None:
    bare = list(examine(machine(tmp_path / "bare", PLAIN, modules=()), DPU))
    assert named(bare, "pyverbs").advice.startswith("apt-get install python3-pyverbs")
    assert "modprobe rdma_rxe" in named(bare, "RDMA device").advice
    nic = {name: text for name, text in SERVER.items() if "infiniband" not in name}
    packages = {"usr/lib/python3/dist-packages/pyverbs/__init__.py": ""}
    driverless = list(examine(machine(tmp_path / "nic", nic | packages, modules=()), DPU))
    assert "debian.pth" in named(driverless, "pyverbs").advice
    assert "modprobe mlx5_ib" in named(driverless, "RDMA device").advice


@pytest.mark.parametrize(
    ("interfaces", "level", "words"),
    [
        (("p0", "pf0hpf", "pf1hpf"), Level.OK, "DPU mode: the host's ports are pf0hpf, pf1hpf"),
        (("p0",), Level.WARN, "NIC"),
    ],
)
def test_the_arm_side_of_a_bluefield_tells_its_mode_by_its_representors(
    tmp_path: Path, interfaces: tuple[str, ...], level: Level, words: str
) -> None:
    files = {name: text for name, text in SERVER.items() if "rshim" not in name and "nvidia" not in name}
    files |= {"sys/class/dmi/id/product_name": "BlueField-3 DPU"}
    files |= {f"sys/class/net/{name}/address": "02:00:00:00:00:01" for name in interfaces}
    finding = named(list(examine(machine(tmp_path, files), DPU)), "BlueField")
    assert finding.level is level
    assert words in finding.found


def test_it_fails_when_something_is_missing_and_only_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doctor(LAPTOP, as_json=True, machine=machine(tmp_path, PLAIN, modules=()))
    assert {row["level"] for row in json.loads(capsys.readouterr().out)} == {"OK"}
    with pytest.raises(CommandError, match=r"MISSING for transport verbs .*Next, for pyverbs: apt-get install"):
        doctor(HOST, as_json=False, machine=Machine(tmp_path, has_module=lambda _: False))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("→ apt-get install python3-pyverbs ibverbs-providers") for line in lines)  # in one piece


@pytest.mark.parametrize(
    ("engine", "limit", "status", "uid_map", "level"),
    [
        ("none", 8 << 20, "", "", Level.OK),  # a gateway locks little
        ("none", 64 << 10, "", "", Level.MISSING),
        ("cpu", 8 << 20, "", "", Level.MISSING),
        ("cpu", 8 << 20, "CapEff:\t000001ffffffffff", "0 0 4294967295", Level.OK),  # root is not held by it
        ("cpu", 8 << 20, "CapEff:\t000001ffffffffff", "0 100000 65536", Level.MISSING),  # but that of a container is
        ("cpu", 8 << 20, "CapEff:\t00000000a80425fb", "0 0 4294967295", Level.MISSING),
    ],
)
def test_the_memlock_limit_is_judged_by_what_is_locked_and_by_whom(
    tmp_path: Path, engine: Literal["cpu", "none"], limit: int, status: str, uid_map: str, level: Level
) -> None:
    files = PLAIN | {
        "proc/self/limits": f"Max locked memory         {limit}              {limit}              bytes",
        "proc/self/status": status,
        "proc/self/uid_map": uid_map,
    }
    findings = list(examine(machine(tmp_path, files), Purpose("verbs", engine)))
    assert named(findings, "memlock limit").level is level


def test_nothing_of_rdma_is_complained_about_for_shared_memory(tmp_path: Path) -> None:
    """A down port, no firmware, no access, NIC mode: none of it matters."""
    files = SERVER | {f"{RDMA_PORT}/state": "1: DOWN", "dev/rshim0/misc": "BF_MODE  NIC mode"}
    assert {finding.level for finding in examine(machine(tmp_path, files), LAPTOP)} == {Level.OK}


def test_irqbalance_on_a_gateways_machine_is_named(tmp_path: Path) -> None:
    files = SERVER | {"proc/17/comm": "irqbalance"}
    assert (
        "systemctl disable --now irqbalance" in named(list(examine(machine(tmp_path, files), DPU)), "processors").advice
    )
    assert named(list(examine(machine(tmp_path, files), HOST)), "processors").level is Level.OK


def test_an_empty_tree_raises_nothing(tmp_path: Path) -> None:
    assert [finding.check for finding in examine(Machine(tmp_path), HOST)]


def test_the_command_works_on_this_machine_and_refuses_what_it_does_not_know() -> None:
    done = blink("doctor", "--json", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    assert done.returncode == 0, done.stderr
    assert {"kernel", "clock", "processors"} <= {row["check"] for row in json.loads(done.stdout)}
    assert purpose_of("verbs", "none", "x:1") == Purpose("verbs", "none", "x:1")
    assert purpose_of("verbs", "none").listen == purpose_of("shm", "cuda").listen == "127.0.0.1:50051"
    assert purpose_of("verbs", "cuda").listen == purpose_of("verbs", "cuda").http == ""  # no client calls the engine
    for flag, words in (("--engine=tpu", "--engine is 'tpu'"), ("--transport=tcp", "--transport is 'tcp'")):
        refused = blink("doctor", flag)
        assert refused.returncode == 1
        assert words in refused.stderr
