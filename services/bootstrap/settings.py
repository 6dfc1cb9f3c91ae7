"""Bootstrap's settings: which model, which engine, how large everything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from services.common.cpu import available_cpus
from services.common.runtime import DEFAULT_INSTANCE, InstanceName, bootstrap_address, ring_path
from services.ring.schema import LINE_BYTES, RingGeometry, record_bytes
from services.ring.settings import RingAccessSettings

DEFAULT_MODEL = "smollm2-135m-instruct"
MAX_DEFAULT_ARENA_BYTES = 64 << 20
CUDA_DEFAULTS = {"kv_tokens": 262_144, "max_running": 256, "max_batched_tokens": 2_048}


class BootstrapSettings(RingAccessSettings):
    """Read once at start. Everything is allocated once from these sizes; nothing grows later."""

    process: ClassVar[str] = "bootstrap"

    instance: InstanceName = Field(DEFAULT_INSTANCE, description="which Blink of this machine this is")
    model: str = Field(DEFAULT_MODEL, min_length=1, description="known model's name, .gguf file or Hugging Face folder")
    engine: Literal["cpu", "cuda"] = Field("cpu", description="what runs the model")
    scheduler: Literal["gpu", "host"] = Field(
        "gpu", description="where the cuda engine schedules; host keeps a core busy and is there for comparison"
    )
    listen: str = Field("", description="address of the handshake, unix:/path or host:port; default a private socket")

    ring_memory: Literal["host", "device", "split"] = Field(
        "host", description="cuda with verbs: ring in host memory, GPU memory, or what gateways read in host memory"
    )
    lanes: int = Field(4, ge=1, le=256, description="gateway workers that can be attached at once")
    lanes_per_certificate: int = Field(
        16, ge=1, le=256, description="lanes that gateways with one name in their certificates may hold together"
    )
    slots_per_lane: int = Field(64, ge=1, le=4096, description="requests in flight of one gateway worker")
    log_entries: int = Field(16_384, ge=64, le=1 << 24, description="tokens of one lane that may wait for its gateway")
    arena_bytes: int = Field(
        0, ge=0, le=1 << 37, multiple_of=LINE_BYTES, description="prompts of one lane; 0: for all slots, up to 64 MiB"
    )
    lease_timeout_ms: int = Field(3_000, ge=100, le=600_000, description="a silent gateway loses its lane after this")

    max_context_tokens: int = Field(0, ge=0, le=1 << 20, description="prompt and output together; 0: the model's own")
    kv_tokens: int = Field(
        32_768, ge=16, le=1 << 26, description="tokens that the KV cache holds, of all requests; cuda: 262,144"
    )
    weights: Literal["bf16", "fp8"] = Field(
        "bf16", description="fp8 quantizes matrices that are not FP8 already: e4m3, a scale for each output"
    )
    kv_cache: Literal["bf16", "fp8"] = Field(
        "bf16", description="what keys and values are kept as (bf16 is float32 in the cpu engine)"
    )
    page_size: int = Field(16, ge=1, le=1024, description="tokens of one KV page")
    max_running: int = Field(64, ge=1, le=4096, description="sequences computed at once; cuda: 256")
    max_batched_tokens: int = Field(
        256, ge=1, le=1 << 16, description="tokens of one step, prompt chunks included; cuda: 2,048"
    )
    max_waiting: int = Field(256, ge=1, le=1 << 20, description="requests queued; more are refused")
    priority_boost: int = Field(32, ge=0, le=1 << 16, description="requests of its lane that one priority may overtake")
    prefix_cache: Literal["exact", "all", "off"] = Field(
        "exact",
        description="share KV pages among requests that begin alike; all: also what the engine would round otherwise",
    )
    threads: int = Field(0, ge=0, le=1024, description="of the cpu engine; 0: the CPUs that this process may use")
    drain_seconds: float = Field(30.0, ge=0, le=3600, description="for running requests to finish after SIGTERM")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_engine(cls, values: dict[str, Any]) -> dict[str, Any]:
        return (CUDA_DEFAULTS if values.get("engine") == "cuda" else {}) | values

    @model_validator(mode="after")
    def _sizes_fit_each_other(self) -> Self:
        self.geometry(self.max_context_tokens or 1)
        return self

    @model_validator(mode="after")
    def _gpu_memory_is_reached_by_rdma(self) -> Self:
        needed = {"engine": "cuda", "scheduler": "gpu", "transport": "verbs"}
        others = [f"{name} {getattr(self, name)!r}" for name, value in needed.items() if getattr(self, name) != value]
        if self.ring_memory != "host" and others:
            raise ValueError(
                f"ring_memory is {self.ring_memory!r}: a ring in GPU memory is for engine 'cuda', scheduler 'gpu' and "
                f"transport 'verbs', not for {', '.join(others)}"
            )
        return self

    @model_validator(mode="after")
    def _network_means_tls(self) -> Self:
        if self.listen and not self.listen.startswith("unix:") and self.tls is None:
            raise ValueError(
                f"listen is {self.listen!r}: the handshake gives away the ring, so beyond a unix socket it needs "
                "handshake_certificate, handshake_key and handshake_authority"
            )
        return self

    @property
    def address(self) -> str:
        """Where the handshake is served."""
        return self.listen or bootstrap_address(self.instance)

    @property
    def ring_path(self) -> Path:
        return ring_path(self.instance)

    @property
    def engine_threads(self) -> int:
        return self.threads or available_cpus()

    def geometry(self, context: int) -> RingGeometry:
        """The ring's sizes for requests of up to ``context`` tokens. Raises ValueError when they contradict."""
        longest = record_bytes(context, 0)
        arena = self.arena_bytes or max(2 * longest, min(self.slots_per_lane * longest, MAX_DEFAULT_ARENA_BYTES))
        return RingGeometry(self.lanes, self.slots_per_lane, arena, self.log_entries)
