"""A reliable connected queue pair with a protection domain and a completion queue of its own."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.mr import MR, DmaBufMR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

from services.ring.errors import RingError
from services.ring.memory import Region
from services.ring.verbs.device import MTU_BYTES, Device, e, gid_of
from services.ring.verbs.grant import QueuePairAddress

LOCAL_ONLY = int(e.IBV_ACCESS_LOCAL_WRITE)
REMOTE_READ = int(e.IBV_ACCESS_REMOTE_READ)
REMOTE_WRITE = int(e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_LOCAL_WRITE)  # the standard wants both
_READS_IN_FLIGHT = 8
_HOP_LIMIT = 64


class VerbsSetupError(RingError):
    """The device or the kernel refused to register memory or to make or connect a queue pair."""


@dataclass(frozen=True)
class QueuePairLimits:
    depth: int = 512  # work requests in the send queue
    inline_bytes: int = 64  # longest write that travels in its work request
    ack_timeout: int = 14  # 4.096 us * 2**ack_timeout until a packet is sent again: 67 ms
    retries: int = 6  # then RETRY_EXC_ERR; not 7, which rdma_rxe takes for ever


class QueuePair:
    """Made in state INIT; ``connect`` makes it work. Regions registered on it are reached through it alone."""

    def __init__(self, device: Device, limits: QueuePairLimits | None = None) -> None:
        self.limits = limits or QueuePairLimits()
        self._device = device
        self._first_packet = secrets.randbits(24)
        capacity = QPCap(
            max_send_wr=self.limits.depth,
            max_recv_wr=1,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=self.limits.inline_bytes,
        )
        attributes = QPAttr(port_num=device.port)
        attributes.qp_access_flags = REMOTE_READ | REMOTE_WRITE
        try:
            self._domain = PD(device.context)
            self.completions: Any = CQ(device.context, self.limits.depth)
            request = QPInitAttr(
                qp_type=e.IBV_QPT_RC, scq=self.completions, rcq=self.completions, cap=capacity, sq_sig_all=0
            )
            self.sender: Any = QP(self._domain, request, attributes)
        except PyverbsRDMAError as error:
            raise VerbsSetupError(f"can't make a queue pair on {device.name}: {error}") from error

    @property
    def address(self) -> QueuePairAddress:
        device = self._device
        return QueuePairAddress(self.sender.qp_num, device.lid, device.gid, self._first_packet, device.mtu)

    def register(self, memory: Region, access: int) -> Any:
        """Pin ``memory`` and register it with this queue pair's protection domain; a pyverbs MR."""
        try:
            return MR(self._domain, memory.size, access, address=memory.ctypes.data)
        except PyverbsRDMAError as error:
            raise VerbsSetupError(
                f"can't register {memory.size} bytes with {self._device.name}: {error}; is RLIMIT_MEMLOCK large enough?"
            ) from error

    def register_dma_buf(self, fd: int, offset: int, length: int, access: int) -> tuple[Any, int]:
        """Register memory that is not this process's, such as a GPU's, by its dma-buf descriptor.

        Returns pyverbs' DmaBufMR, and the address by which peers name its first byte. That address (``iova`` of
        libibverbs' ibv_reg_dmabuf_mr) is free to choose there, but pyverbs takes no such argument: in every version it
        passes the offset.
        """
        try:
            return DmaBufMR(self._domain, length, access, dmabuf=fd, offset=offset), offset
        except PyverbsRDMAError as error:
            raise VerbsSetupError(
                f"can't register {length} bytes of GPU memory (dma-buf) with {self._device.name}: {error}; it needs "
                "Linux 5.12 or newer, NVIDIA's open kernel module, and a NIC whose driver takes dma-buf (mlx5: "
                "ConnectX-5 or newer; soft-RoCE does not): see `blink doctor`, or set ring_memory = host"
            ) from error

    def connect(self, peer: QueuePairAddress, *, answers_only: bool = False) -> None:
        """Reach the peer; one that ``answers_only`` serves the peer's operations and can't start any."""
        device = self._device
        path = GlobalRoute(dgid=gid_of(peer.gid), sgid_index=device.gid_index, hop_limit=_HOP_LIMIT)
        attributes = QPAttr(port_num=device.port)
        attributes.qp_access_flags = REMOTE_READ | REMOTE_WRITE
        attributes.ah_attr = AHAttr(dlid=peer.lid, is_global=1, port_num=device.port, gr=path)
        attributes.path_mtu = next(code for code, size in MTU_BYTES.items() if size == min(device.mtu, peer.mtu))
        attributes.dest_qp_num = peer.number
        attributes.rq_psn, attributes.sq_psn = peer.first_packet, self._first_packet
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = _READS_IN_FLIGHT
        attributes.min_rnr_timer = 12  # of no use without receives, but the transition wants it
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = self.limits.ack_timeout, self.limits.retries, 0
        try:
            self.sender.to_rtr(attributes)
            if not answers_only:
                self.sender.to_rts(attributes)
        except PyverbsRDMAError as error:
            raise VerbsSetupError(
                f"can't connect a queue pair on {device.name} to {peer.number} at {peer.gid}: {error}; is it reachable?"
            ) from error

    def close(self) -> None:
        """Destroys the queue pair and revokes every region registered with it; may be called twice."""
        self.sender.close()
        self._domain.close()
        self.completions.close()
