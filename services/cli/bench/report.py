"""The report of a benchmark: what its JSON holds. ``blink bench --schema`` prints this as a JSON Schema."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    """Anything of a report; readers may rely on every field being there."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Value(Part):
    """A figure over the repeats of a point."""

    mean: float = Field(description="mean of the repeats' values")
    low: float | None = Field(description="lower end of its 95% confidence interval; null for a single repeat")
    high: float | None = Field(description="upper end")


class Latency(Part):
    """A latency in milliseconds: percentiles of each repeat, then their mean and interval over repeats."""

    samples: int = Field(description="of all repeats; a percentile above 1 - 1/samples is the largest sample")
    mean: Value
    p50: Value
    p95: Value
    p99: Value
    p999: Value


class ClientHealth(Part):
    """The load generator itself, all repeats together: whether it was fast enough to be believed."""

    ok: bool = Field(description="no limit of the load generator's was passed")
    lateness_p99_ms: float = Field(description="from a request's scheduled time to its sending")
    lateness_max_ms: float
    loop_delay_p99_ms: float = Field(description="by how much its event loops were late to read what had arrived")
    busy_max: float = Field(description="largest share of a core that one of its processes used; near 1 it is too slow")
    processes: int


class Interference(Part):
    """Neighbours that ran beside the measurement."""

    count: int
    cpus: list[int]
    copy_gb_per_s: float
    update_gb_per_s: float
    walk_gb_per_s: float


class Point(Part):
    """One load, all its repeats."""

    load: float = Field(description="requests a second that were offered; of a trace its speed")
    repeats: int
    requests: int = Field(description="that were sent, all repeats")
    failed: dict[str, int] = Field(description="requests that were not answered to their end, by what they failed with")
    prompt_tokens: int
    output_tokens: int
    offered_requests_per_s: Value | None = Field(description="as they were drawn; null when all came at once")
    requests_per_s: Value = Field(description="answered, from the start to the last answer's end")
    output_tokens_per_s: Value
    goodput_requests_per_s: Value | None = Field(description="answered within the SLO; null without one")
    slo_share: Value | None = Field(description="of the requests sent, those answered within the SLO")
    ttft_ms: Latency | None = Field(description="sending to first token; null when nothing was answered")
    tpot_ms: Latency | None = Field(description="mean time per output token of each request, the first left out")
    itl_ms: Latency | None = Field(description="from one arrival of tokens to the next, of all requests")
    end_to_end_ms: Latency | None = Field(description="sending to last token")
    host_cpu_us_per_token: Value | None = Field(description="CPU time of the server's host; null when not told apart")
    gpu_joules_per_token: Value | None = Field(description="energy of the GPUs; null without NVML")
    client: ClientHealth
    interference: Interference | None


class Slo(Part):
    """What a request must keep to count as goodput."""

    ttft_ms: float | None
    tpot_ms: float | None


class Report(Part):
    """A whole run. The schema's number grows when a reader of the one before could misread a report."""

    version: Literal["blink-bench/1"] = Field(alias="schema")
    blink: str = Field(description="version of this program")
    started: str = Field(description="UTC, ISO 8601")
    label: str
    target: str
    protocol: str
    model: str
    workload: str = Field(description="in words")
    seed: int
    slo: Slo | None
    machine: str
    cpus: list[int] = Field(description="that the load generator ran on")
    notes: list[str] = Field(description="what could not be measured, and why")
    points: list[Point]
    maximum_load: float | None = Field(
        description="highest rate that --search found serviceable; null when not asked for"
    )
