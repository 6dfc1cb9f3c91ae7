"""An opened RDMA device, and pyverbs under one set of names."""

from __future__ import annotations

import importlib
import ipaddress
from pathlib import Path
from typing import Any

from services.ring.errors import RingError


class NoPyverbsError(RingError):
    """pyverbs, which this package cannot do without, can't be imported."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"transport verbs needs pyverbs ({problem}): install Debian's or Ubuntu's python3-pyverbs and let this "
            "Python see it (docs/rdma.md)"
        )


class NoDeviceError(RingError):
    """There is no such RDMA device, or it can't be used."""


try:
    from pyverbs.addr import GID
    from pyverbs.device import Context, get_device_list
    from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError
except ImportError as error:
    raise NoPyverbsError(str(error)) from error

try:
    e: Any = importlib.import_module("pyverbs.libibverbs_enums")
except ImportError:
    e = importlib.import_module("pyverbs.enums")  # its name in older ones, such as Debian 12's 44
MTU_BYTES = {code: 128 << code for code in range(1, 6)}  # enum ibv_mtu: 1 is 256 bytes, 5 is 4096


class Device:
    """One port of one device, and the GID that RoCE v2 over IPv4 uses, or the port's first one on InfiniBand."""

    def __init__(self, name: str = "", *, port: int = 1, gid_index: int = -1, mtu: int = 0) -> None:
        """Open it.

        Args:
            name: of the device; empty for the only one that there is.
            port: counted from 1.
            gid_index: entry of the port's table; -1 chooses.
            mtu: bytes, if less than the port's; 0 for the port's.

        Raises:
            NoDeviceError: naming the devices that there are.
        """
        name = name or _only_device()
        try:
            self.context: Any = Context(name=name)
        except PyverbsError as error:
            raise NoDeviceError(f"can't open RDMA device {name}: {error}; devices here: {_listed()}") from error
        self.name, self.port = name, port
        try:
            attributes = self.context.query_port(port)
        except PyverbsError as error:
            raise NoDeviceError(f"RDMA device {name} has no port {port}: {error}") from error
        if attributes.state != e.IBV_PORT_ACTIVE:
            raise NoDeviceError(f"port {port} of RDMA device {name} is not active: is its link up?")
        port_mtu = MTU_BYTES[attributes.active_mtu]
        self.mtu = min(port_mtu, mtu or port_mtu)
        self.lid: int = attributes.lid
        if gid_index < 0:
            self.gid_index, self.gid = self._choose_gid(attributes.gid_tbl_len)
        else:
            self.gid_index, self.gid = gid_index, self._gid_at(gid_index)

    def close(self) -> None:
        """Closes everything made on it, too."""
        self.context.close()

    def _gid_at(self, index: int) -> str:
        try:
            gid = ipaddress.IPv6Address(str(self.context.query_gid(self.port, index)))
        except PyverbsRDMAError as error:
            raise NoDeviceError(f"port {self.port} of RDMA device {self.name} has no GID {index}: {error}") from error
        if not int(gid):
            raise NoDeviceError(f"GID {index} of port {self.port} of RDMA device {self.name} is empty")
        return str(gid)

    def _choose_gid(self, count: int) -> tuple[int, str]:
        first: tuple[int, str] | None = None
        for index in range(count):
            try:
                text = str(self.context.query_gid(self.port, index))
            except PyverbsRDMAError:
                continue  # an empty entry
            address = ipaddress.IPv6Address(text)
            if self._is_roce_v1(index):
                continue
            if address.ipv4_mapped is not None:
                return index, str(address)
            if first is None and int(address):
                first = index, str(address)
        if first is None:
            raise NoDeviceError(
                f"port {self.port} of RDMA device {self.name} has no GID: give its interface an address"
            )
        return first

    def _is_roce_v1(self, index: int) -> bool:
        """RoCE v1 has entries of the same GIDs, but is not routed."""
        kind = Path(f"/sys/class/infiniband/{self.name}/ports/{self.port}/gid_attrs/types/{index}")
        try:
            return kind.read_text().strip() == "IB/RoCE v1" and self.lid == 0
        except OSError:  # InfiniBand's entries have no type
            return False


def device_names() -> list[str]:
    try:
        return sorted(device.name.decode() for device in get_device_list())
    except PyverbsRDMAError:  # what it raises when there is none
        return []


def _listed() -> str:
    return ", ".join(device_names()) or "none"


def _only_device() -> str:
    names = device_names()
    if len(names) != 1:
        raise NoDeviceError(f"which RDMA device? Name one with rdma_device; devices here: {_listed()}")
    return names[0]


def gid_of(text: str) -> Any:
    """pyverbs wants all eight groups."""
    return GID(ipaddress.IPv6Address(text).exploded)
