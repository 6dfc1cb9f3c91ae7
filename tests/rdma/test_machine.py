"""The emulated machine itself."""

from __future__ import annotations


def test_two_soft_roce_devices_are_there() -> None:
    from pyverbs.device import get_device_list  # noqa: PLC0415 (only in the machine)

    assert sorted(device.name for device in get_device_list()) == [b"rxe_dpu", b"rxe_host"]
