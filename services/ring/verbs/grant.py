"""What the two ends of a connection tell each other before it works; plain data, for the handshake to carry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QueuePairAddress:
    """Where a queue pair is reached."""

    number: int  # 24 bits
    lid: int  # on InfiniBand; 0 on Ethernet
    gid: str  # as IPv6 text; RoCE v2 over IPv4 is ::ffff:a.b.c.d
    first_packet: int  # 24 bits: sequence number of the first packet that it sends
    mtu: int  # bytes, the port's active one; a path uses the smaller of both ends


@dataclass(frozen=True)
class RemoteRegion:
    """A registered part of the ring, as its peer may use it."""

    offset: int  # of its first byte in the ring
    length: int  # bytes
    address: int  # of its first byte, in the owner's address space
    rkey: int
    writable: bool  # readable always

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

    @property
    def regions(self) -> tuple[RemoteRegion, ...]:
        return self.header, self.inbound, self.outbound
