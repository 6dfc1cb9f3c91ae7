"""Names of work completion statuses."""

from __future__ import annotations

import enum

from services.ring.errors import TransportLostError


class CompletionStatus(enum.IntEnum):
    """``enum ibv_wc_status`` of libibverbs, without its prefix."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23


_MEANINGS = {
    CompletionStatus.REM_ACCESS_ERR: "the peer's memory region does not allow it: wrong or revoked rkey, or range",
    CompletionStatus.REM_INV_REQ_ERR: "the peer's queue pair does not allow it, or the ends disagree on the MTU",
    CompletionStatus.RETRY_EXC_ERR: "no answer: link down, peer gone, or an MTU too large for the path",
    CompletionStatus.WR_FLUSH_ERR: "the queue pair failed before",
}


class CompletionError(TransportLostError):
    """An operation failed, which ends its queue pair: connect again. ``status`` is None for a code not known here."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.status = CompletionStatus(code) if code in CompletionStatus.__members__.values() else None
        name = self.status.name if self.status is not None else "unknown"
        self.cause = name if self.status is not None else f"STATUS_{code}"
        meaning = _MEANINGS.get(self.status) if self.status is not None else None
        super().__init__(f"RDMA operation failed: {name} (status {code}){': ' + meaning if meaning else ''}")
