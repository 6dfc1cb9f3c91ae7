"""What the two ends of a connection tell each other before it works; plain data, for the handshake to carry."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields
from typing import Any, Self

MTUS = (256, 512, 1024, 2048, 4096)  # bytes, all that InfiniBand and RoCE know


@dataclass(frozen=True)
class QueuePairAddress:
    """Where a queue pair is reached. Raises ValueError naming the field that can't be: it may come from a stranger."""

    number: int  # 24 bits
    lid: int  # on InfiniBand; 0 on Ethernet
    gid: str  # as IPv6 text; RoCE v2 over IPv4 is ::ffff:a.b.c.d
    first_packet: int  # 24 bits: sequence number of the first packet that it sends
    mtu: int  # bytes, the port's active one; a path uses the smaller of both ends

    def __post_init__(self) -> None:
        for name, value, bits in (
            ("number", self.number, 24),
            ("lid", self.lid, 16),
            ("first_packet", self.first_packet, 24),
        ):
            if not 0 <= value < 1 << bits:
                raise ValueError(f"queue pair's {name} is {value}, must be 0 to {(1 << bits) - 1}")
        if self.mtu not in MTUS:
            raise ValueError(f"queue pair's mtu is {self.mtu}, must be one of {', '.join(map(str, MTUS))}")
        try:
            ipaddress.IPv6Address(self.gid)
        except ValueError as error:
            raise ValueError(f"queue pair's gid is {self.gid!r}, must be an IPv6 address") from error

    @classmethod
    def of(cls, message: Any) -> Self:
        """From anything with fields of the same names, such as the handshake's message."""
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class RemoteRegion:
    """A registered part of the ring, as its peer may use it."""

    offset: int  # of its first byte in the ring
    length: int  # bytes
    address: int  # of its first byte, in the owner's address space
    rkey: int
    writable: bool  # readable always

    @classmethod
    def of(cls, message: Any) -> Self:
        """From anything with fields of the same names."""
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})

    def holds(self, offset: int, length: int) -> bool:
        return self.offset <= offset and offset + length <= self.offset + self.length


@dataclass(frozen=True)
class LaneGrant:
    """All that a gateway needs to reach one lane: the owner's queue pair and the regions that it may use."""

    lane: int
    ring_bytes: int
    queue_pair: QueuePairAddress
    header: RemoteRegion  # read only
    inbound: RemoteRegion  # the lane's, read and write
    outbound: RemoteRegion  # the lane's, read only

    @classmethod
    def of(cls, message: Any) -> Self:
        """From anything with fields of the same names. Raises ValueError."""
        header, inbound, outbound = (
            RemoteRegion.of(getattr(message, name)) for name in ("header", "inbound", "outbound")
        )
        address = QueuePairAddress.of(message.queue_pair)
        return cls(message.lane, message.ring_bytes, address, header, inbound, outbound)

    @property
    def regions(self) -> tuple[RemoteRegion, ...]:
        return self.header, self.inbound, self.outbound
