"""The operator's settings."""

from __future__ import annotations

import socket
from typing import ClassVar, Literal

from pydantic import Field

from services.common.settings import ProcessSettings


class OperatorSettings(ProcessSettings):
    """Read once at start; times are in seconds."""

    process: ClassVar[str] = "operator"

    namespace: str = Field("default", min_length=1, max_length=63, description="where the lease of the leader lies")
    lease: str = Field("blink-operator", min_length=1, max_length=253, description="name of that lease")
    identity: str = Field("", max_length=253, description="names this replica; default the host's name")
    lease_seconds: int = Field(15, ge=5, le=600, description="a leader that is silent this long has lost the lease")
    interval: float = Field(5.0, ge=0.1, le=300, description="between two decisions when nothing changes")
    settle: float = Field(0.2, ge=0, le=10, description="from a change to the decision on it, to gather more changes")
    start_limit: float = Field(120.0, ge=1, le=3600, description="for a tenant's pod to be scheduled, once released")
    sweep: float = Field(300.0, ge=1, le=86_400, description="between two looks for what went unseen by the watches")
    scrape_timeout: float = Field(2.0, ge=0.1, le=30, description="for a gateway to answer with its metrics")
    metrics_port: int = Field(8080, ge=0, le=65_535, description="of the operator's own metrics; 0 for none")
    health_port: int = Field(8081, ge=0, le=65_535, description="of the liveness answer; 0 for none")
    priority_class: str = Field("", max_length=253, description="of tenants whose template names none")
    resize: Literal["auto", "off"] = Field("auto", description="in-place resize: where the cluster has it, or never")

    @property
    def replica(self) -> str:
        return self.identity or socket.gethostname()
