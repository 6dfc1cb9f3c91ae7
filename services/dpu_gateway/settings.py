"""A gateway worker's settings."""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from services.common.cpu import available_cpus
from services.common.runtime import DEFAULT_INSTANCE, InstanceName
from services.ring.settings import RingAccessSettings

HTTP_OFF = "off"


class GatewaySettings(RingAccessSettings):
    """Read once at start; times are in seconds unless the name says otherwise."""

    process: ClassVar[str] = "gateway"

    instance: InstanceName = Field(DEFAULT_INSTANCE, description="which Blink of this machine the worker belongs to")
    worker: int = Field(0, ge=0, le=255, description="number of this worker among those that share the port")
    gateway_id: str = Field("", max_length=128, description="names the lane's owner; default HOST/WORKER")
    listen: str = Field("127.0.0.1:50051", min_length=1, description="address of the API; its workers share it")
    http_listen: str = Field(
        "127.0.0.1:8000", min_length=1, description="address of the OpenAI API, /ready and /metrics; off for none"
    )
    health_listen: str = Field(
        HTTP_OFF, min_length=1, description="address of this worker's own /health and /ready, without TLS; off for none"
    )
    bootstrap: str = Field("", description="gRPC target of the bootstrap; default the instance's unix socket")
    bootstrap_name: str = Field("", description="name in the bootstrap's certificate, if not the target's host")
    model_fingerprint: str = Field("", pattern="^([0-9a-f]{64})?$", description="serve no other model than this one")

    tls_certificate: Path | None = Field(None, description="PEM chain; with it both addresses speak TLS alone")
    tls_key: Path | None = Field(None, description="PEM key of the certificate")
    tls_client_authority: Path | None = Field(None, description="PEM authorities of the clients that may connect")

    api_keys: Path | None = Field(None, description="TOML file of API keys (blink key new); none lets anybody call")

    trace_endpoint: str = Field(
        "", pattern=r"^(https?://.+)?$", description="OpenTelemetry collector, http://HOST:4317; empty traces nothing"
    )
    trace_ratio: float = Field(1.0, ge=0, le=1, description="share traced of requests that bring no trace of their own")

    encode_threads: int = Field(0, ge=0, le=64, description="threads that tokenize; 0 takes one for each available CPU")
    poll_fast_us: int = Field(
        250, ge=50, le=100_000, description="between two looks at the token log while tokens are due"
    )
    poll_slow_us: int = Field(2_000, ge=50, le=1_000_000, description="the same when none came for a while")
    longest_chunk_gap: float = Field(
        0.04, ge=0, le=1, description="between two chunks of a stream when the worker is busy and gathers tokens"
    )
    watch_interval: float = Field(0.1, ge=0.001, le=0.2, description="between two looks at the engine's heartbeat")
    heartbeat_timeout: float = Field(
        1.5, ge=0.05, le=60, description="a heartbeat that stands this long is a dead engine"
    )
    progress_timeout: float = Field(
        30.0, ge=0.05, le=3600, description="requests but no step for this long: health reports NOT_SERVING"
    )
    attach_timeout: float = Field(5.0, ge=0.1, le=60, description="for the bootstrap and the engine to grant a lane")
    reattach_delay: float = Field(0.25, ge=0.01, le=60, description="before the first new try to attach; then doubles")
    reattach_longest: float = Field(2.0, ge=0.01, le=600, description="between two tries to attach, at most")
    retry_after: float = Field(0.5, ge=0, le=60, description="what refused callers are told to wait")
    drain_limit: float = Field(30.0, ge=0, le=3600, description="for open streams to finish after SIGTERM")
    max_message_bytes: int = Field(16 << 20, ge=1 << 10, le=1 << 30, description="largest request")
    max_unsent_entries: int = Field(
        65_536, ge=64, le=1 << 24, description="log entries held for a client that reads slowly; more end its stream"
    )
    write_limit: float = Field(30.0, gt=0, le=3600, description="for a client to make room for what it is sent")
    keepalive_interval: float = Field(30.0, ge=1, le=3600, description="between pings of idle connections")
    http_keep_alive: int = Field(75, ge=1, le=3600, description="for an idle HTTP connection to stay open")
    http_max_connections: int = Field(
        0, ge=0, le=1 << 20, description="open at once, more close the longest idle; 0: half of the file descriptors"
    )
    keepalive_timeout: float = Field(10.0, ge=1, le=600, description="for the answer to a ping")

    @model_validator(mode="after")
    def _slow_is_not_faster_than_fast(self) -> Self:
        if self.poll_slow_us < self.poll_fast_us:
            raise ValueError(f"poll_slow_us is {self.poll_slow_us}, must be at least poll_fast_us, {self.poll_fast_us}")
        return self

    @model_validator(mode="after")
    def _network_means_tls(self) -> Self:
        if self.bootstrap and not self.bootstrap.startswith("unix:") and self.tls is None:
            raise ValueError(
                f"bootstrap is {self.bootstrap!r}: beyond a unix socket the handshake is over TLS, which needs "
                "handshake_certificate, handshake_key and handshake_authority"
            )
        return self

    @model_validator(mode="after")
    def _tls_files_come_together(self) -> Self:
        if (self.tls_certificate is None) is not (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_certificate"
            raise ValueError(f"{missing} is missing: a certificate and its key go together")
        if self.tls_client_authority is not None and self.tls_certificate is None:
            raise ValueError("tls_client_authority needs tls_certificate and tls_key")
        return self

    @property
    def serves_http(self) -> bool:
        return self.http_listen != HTTP_OFF

    @property
    def serves_health(self) -> bool:
        return self.health_listen != HTTP_OFF

    @property
    def lane_owner(self) -> str:
        """Stable over restarts of this worker."""
        return self.gateway_id or f"{socket.gethostname()}/{self.instance}/{self.worker}"

    @property
    def most_http_connections(self) -> int:
        """A descriptor each; the other half is for gRPC's and everything else."""
        return self.http_max_connections or resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2

    @property
    def tokenizer_threads(self) -> int:
        return self.encode_threads or available_cpus()
