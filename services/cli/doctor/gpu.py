"""The GPU, its driver, and how a NIC may reach its memory."""

from __future__ import annotations

import re

from services.cli.doctor.finding import Finding, missing, ok, warn
from services.cli.doctor.machine import Machine, Purpose

CUDA_DRIVER = 580  # the first of CUDA 13
DMA_BUF_KERNEL = (5, 12)  # the first that registers dma-buf memory with a NIC


def check_driver(machine: Machine, purpose: Purpose) -> Finding:
    check = "NVIDIA driver"
    text = machine.read("proc/driver/nvidia/version")
    match = re.search(r"\b(\d{3})\.\d+", text)
    if match is None:
        if purpose.engine != "cuda":
            return ok(check, "none, not needed without the cuda engine")
        found = f"none, {len(machine.gpus)} GPU seen on the bus" if machine.gpus else "none, and no GPU on the bus"
        return missing(check, found, f"install NVIDIA's driver {CUDA_DRIVER} or newer, or use --engine cpu")
    kind = "open kernel module" if "Open Kernel Module" in text else "proprietary kernel module"
    if int(match[1]) < CUDA_DRIVER and purpose.engine == "cuda":
        return missing(check, f"{match[0]}, {kind}", f"CUDA 13 needs {CUDA_DRIVER} or newer")
    return ok(check, f"{match[0]}, {kind}")


def check_iommu(machine: Machine, purpose: Purpose) -> Finding:
    """Translation of the NIC's addresses sends its traffic to the GPU through the root complex."""
    check = "IOMMU"
    if not purpose.gpu_memory:
        return ok(check, "not looked at: that is for GPU memory by RDMA")
    kinds = {machine.read(f"sys/class/infiniband/{name}/device/iommu_group/type") for name in machine.rdma_devices}
    kinds -= {""}
    if any(kind.startswith("DMA") for kind in kinds):
        advice = (
            "boot with iommu=pt, and switch ACS off on the PCIe switch between NIC and GPU; ring_memory = host is fine"
        )
        return warn(check, f"translates the NIC's addresses ({', '.join(sorted(kinds))})", advice)
    return ok(check, ", ".join(sorted(kinds)) or "off")


def check_gpu_memory(machine: Machine, purpose: Purpose) -> Finding:
    """Whether a NIC can register GPU memory: by dma-buf, or through nvidia-peermem."""
    check = "GPU memory by RDMA"
    if not purpose.gpu_memory:
        return ok(check, "not needed: that is for transport verbs with the cuda engine")
    driver = machine.read("proc/driver/nvidia/version")
    by_dma_buf = machine.kernel >= DMA_BUF_KERNEL and "Open Kernel Module" in driver
    ways = [
        name
        for name, there in (("dma-buf", by_dma_buf), ("nvidia-peermem", machine.exists("sys/module/nvidia_peermem")))
        if there
    ]
    if "dma-buf" in ways:
        return ok(check, ", ".join(ways))
    advice = (
        f"dma-buf needs Linux {DMA_BUF_KERNEL[0]}.{DMA_BUF_KERNEL[1]} or newer and the driver's open kernel module; "
        "without it set ring_memory = host"
    )
    return warn(check, f"no dma-buf{'; nvidia-peermem, which Blink does not use' if ways else ''}", advice)
