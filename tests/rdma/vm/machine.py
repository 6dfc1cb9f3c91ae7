"""One run of the emulated machine: boots, runs tests, prints their reports, powers off."""

from __future__ import annotations

import compileall
import json
import os
import shlex
import shutil
import site
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from services.bootstrap.store import ModelStore
from services.common.errors import BlinkError
from tests.rdma.vm import initramfs
from tests.rdma.vm.packages import MachineUnavailableError, cache_folder, unpacked

REPOSITORY = Path(__file__).parents[3]
TIME_LIMIT = float(os.environ.get("BLINK_RDMA_TIME_LIMIT", "1200"))  # seconds, boot included
_KERNEL_OPTIONS = "console=ttyS0 panic=-1 quiet no_timer_check mitigations=off nokaslr"
_CONSOLE_LINES = 40
MODEL = "smollm2-135m-instruct"


def run_tests(tests: list[str]) -> tuple[list[dict[str, Any]], str]:
    """Run pytest's node ids ``tests``, relative to the repository, inside the machine.

    Returns the reports that the tests' pytest made, serialized by its own hook, and the end of the console: qemu's
    exit status says nothing of what happened inside, so a test without a report has failed.

    Raises MachineUnavailableError when there is no qemu or the packages can't be had.
    """
    qemu = shutil.which("qemu-system-x86_64")
    if qemu is None:
        raise MachineUnavailableError("qemu-system-x86_64 is missing: apt-get install qemu-system-x86")
    root = unpacked(initramfs.prepare)
    _check_python(root)
    model = _model_file()
    _compile()
    (kernel,) = (root / "boot").glob("vmlinuz-*")
    with tempfile.TemporaryDirectory(prefix="blink-rdma-", dir=cache_folder()) as folder:
        image, results, console = (Path(folder) / name for name in ("root.cpio", "results", "console"))
        environment = {
            "BLINK_REPOSITORY": str(REPOSITORY),
            "BLINK_PACKAGES": site.getsitepackages()[0],
            "BLINK_TESTS": "\n".join(tests),
            "BLINK_MODEL_FILE": str(model),
            "BLINK_PYVERBS": os.environ.get("BLINK_PYVERBS", ""),  # a folder in the repository; Debian's if none
        }
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
        initramfs.build(root, REPOSITORY / "tests/rdma/vm/init.sh", exports, image)
        command = [
            qemu,
            # KVM inside a virtual machine is far slower than emulation. Without erms and fsrm the kernel copies 8 bytes
            # at a time, so that soft-RoCE, like hardware, never tears an aligned word. Without avx2 the cpu engine
            # takes narrow vectors, which are emulated many times faster.
            *("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,-erms,-fsrm,-avx2,-fma"),
            *("-smp", "2", "-m", "3072"),
            *("-kernel", str(kernel), "-initrd", str(image), "-append", _KERNEL_OPTIONS),
            *("-fsdev", f"local,id=repository,path={REPOSITORY},security_model=none,readonly=on"),
            *("-device", "virtio-9p-pci,fsdev=repository,mount_tag=repository"),
            *("-fsdev", f"local,id=model,path={model.parent},security_model=none,readonly=on"),
            *("-device", "virtio-9p-pci,fsdev=model,mount_tag=model"),
            *("-serial", f"file:{console}", "-serial", f"file:{results}"),
            *("-display", "none", "-nodefaults", "-no-user-config", "-no-reboot"),
        ]
        problem = ""
        try:
            subprocess.run(command, check=True, timeout=TIME_LIMIT, stdin=subprocess.DEVNULL, capture_output=True)
        except subprocess.TimeoutExpired:
            problem = f"\nthe machine was stopped after {TIME_LIMIT:g} s"
        except subprocess.CalledProcessError as error:
            problem = f"\nqemu: {error.stderr.decode(errors='replace').strip()}"
        lines = console.read_text(errors="replace").splitlines() if console.exists() else []
        return _reports(results), "\n".join(lines[-_CONSOLE_LINES:]) + problem


def _compile() -> None:
    """Blink's own modules, whether or not this Python writes what it compiles: there each start would do it anew."""
    for name in ("services", "tests"):
        compileall.compile_dir(REPOSITORY / name, quiet=2)


def _model_file() -> Path:
    """SmolLM2 as it lies in the store: the machine sees its folder."""
    try:
        return ModelStore().resolve(MODEL).resolve()
    except BlinkError as error:
        raise MachineUnavailableError(f"the split deployment's model is missing ({error}): make model") from error


def _reports(results: Path) -> list[dict[str, Any]]:
    lines = results.read_text(errors="replace").splitlines() if results.exists() else []
    reports = []
    for line in lines:
        try:
            reports.append(json.loads(line))
        except json.JSONDecodeError:  # cut short by the machine's end: its test has no report, so it fails
            continue
    return reports


def _check_python(root: Path) -> None:
    """The machine runs Debian's Python with this venv's packages and extensions."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not (root / f"usr/bin/python{version}").exists():
        raise MachineUnavailableError(
            f"the venv's Python is {version}, Debian's here is another: the emulated machine can't load its extensions"
        )
    if not Path(site.getsitepackages()[0]).is_relative_to(REPOSITORY):
        raise MachineUnavailableError(f"the venv must lie in {REPOSITORY}, which is all that the machine sees")
