"""Settings that gateway and bootstrap share: how they meet, and how the ring is reached."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from services.common.settings import ProcessSettings
from services.common.tls import TlsFiles
from services.ring.verbs.grant import MTUS

_TLS_NAMES = ("handshake_certificate", "handshake_key", "handshake_authority")


class RingAccessSettings(ProcessSettings):
    """Base of both processes' settings."""

    transport: Literal["shm", "verbs"] = Field("shm", description="how the ring is reached: shared memory or RDMA")
    rdma_device: str = Field("", description="verbs: name of the RDMA device; default the only one there is")
    rdma_port: int = Field(1, ge=1, le=255, description="verbs: port of the device")
    rdma_gid_index: int = Field(
        -1, ge=-1, le=255, description="verbs: entry of the port's GID table; -1: the first of RoCE v2 over IPv4"
    )
    rdma_mtu: int = Field(0, description="verbs: largest packet in bytes, 256 to 4096; 0: the port's")
    handshake_certificate: str = Field("", description="PEM file: this process's certificate for the handshake's TLS")
    handshake_key: str = Field("", description="PEM file: the key of that certificate")
    handshake_authority: str = Field("", description="PEM file: certificates that the other side's must come from")

    @model_validator(mode="after")
    def _mtu_exists(self) -> Self:
        if self.rdma_mtu and self.rdma_mtu not in MTUS:
            raise ValueError(f"rdma_mtu is {self.rdma_mtu}, must be 0 or one of {', '.join(map(str, MTUS))}")
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        given = [name for name in _TLS_NAMES if getattr(self, name)]
        if given and len(given) < len(_TLS_NAMES):
            missing = ", ".join(name for name in _TLS_NAMES if name not in given)
            raise ValueError(f"{given[0]} is given without {missing}: TLS needs all three")
        return self

    @property
    def tls(self) -> TlsFiles | None:
        """Of the handshake; None when it is not over TLS."""
        if not self.handshake_certificate:
            return None
        return TlsFiles(Path(self.handshake_certificate), Path(self.handshake_key), Path(self.handshake_authority))
