"""The emulated machine itself."""

from __future__ import annotations

import os
from pathlib import Path

DEBIAN = Path("/usr/lib")


def test_two_soft_roce_devices_are_there() -> None:
    from pyverbs.device import get_device_list  # noqa: PLC0415 (only in the machine)

    assert sorted(device.name for device in get_device_list()) == [b"rxe_dpu", b"rxe_host"]


def test_pyverbs_and_its_rdma_core_are_those_that_were_asked_for() -> None:
    from pyverbs import qp  # noqa: PLC0415

    asked_for = os.environ["BLINK_PYVERBS"]
    root = Path(asked_for).parent if asked_for else DEBIAN
    loaded = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    (library,) = (path for path in loaded if path.name.startswith("libibverbs.so"))
    assert library.is_relative_to(root)
    assert Path(qp.__file__).is_relative_to(root)
