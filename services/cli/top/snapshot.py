"""What is shown of one moment: figures as they are, rates since the reading before, latencies over the last minute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.cli.top.scrape import Scrape, increase
from services.common.histogram import quantile

HISTOGRAMS = {
    "ttft": "blink_time_to_first_token_seconds",
    "itl": "blink_inter_token_latency_seconds",
    "tpot": "blink_request_time_per_output_token_seconds",
    "e2e": "blink_e2e_request_latency_seconds",
    "queue": "blink_request_queue_time_seconds",
}


@dataclass(frozen=True)
class Latency:
    """Milliseconds; None where nothing was observed."""

    p50: float | None
    p99: float | None
    count: int


@dataclass(frozen=True)
class Lane:
    lane: int
    attached: bool
    running: int
    waiting: int
    tokens: int
    tokens_per_s: float
    log_backlog: int


@dataclass(frozen=True)
class Snapshot:
    """Counts are since the workers (of the engine's: since the engine) started."""

    engine_state: str
    heartbeat_age_s: float
    running: int
    waiting: int
    open_requests: int
    kv_usage: float  # share
    kv_pages: int
    generated_per_s: float
    prompt_per_s: float
    step_ms: float | None  # mean
    preemptions: int
    prefix_hit_rate: float | None  # share of the prompt tokens looked for
    latency_window_s: float | None  # None: since the workers started
    latency: dict[str, Latency]
    finished: dict[str, int]
    rejected: dict[str, int]
    engine_losses: dict[str, int]
    lanes: list[Lane]

    @classmethod
    def of(cls, readings: Sequence[Scrape], *, since_start: bool = False) -> Snapshot:
        """``readings``: oldest first, at least one; rates are over the last two, latencies over all of them.

        A single reading has no rates. Its latencies, as those of ``since_start``, are of all that the workers did.
        """
        since_start |= len(readings) == 1
        now = readings[-1]
        before = readings[-2] if len(readings) > 1 else now
        oldest = Scrape(0.0, {}) if since_start else readings[0]
        seconds = max(now.taken_at - before.taken_at, 1e-9)

        def rate(name: str) -> float:
            return sum(increase(before, now, name).values()) / seconds

        steps = sum(increase(before, now, "blink_engine_steps_total").values())
        step_seconds = sum(increase(before, now, "blink_engine_step_seconds_total").values())
        states = now.by_label("blink_engine_state")
        return cls(
            engine_state=next((name for name, is_it in states.items() if is_it), "unknown"),
            heartbeat_age_s=now.value("blink_engine_heartbeat_age_seconds"),
            running=int(now.value("blink_num_requests_running")),
            waiting=int(now.value("blink_num_requests_waiting")),
            open_requests=int(now.value("blink_gateway_open_requests")),
            kv_usage=now.value("blink_kv_cache_usage_perc"),
            kv_pages=int(now.value("blink_kv_cache_pages")),
            generated_per_s=rate("blink_generation_tokens_total"),
            prompt_per_s=rate("blink_prompt_tokens_total"),
            step_ms=step_seconds / steps * 1e3 if steps else None,
            preemptions=int(now.value("blink_num_preemptions_total")),
            prefix_hit_rate=_prefix_hit_rate(oldest, now),
            latency_window_s=None if since_start else now.taken_at - oldest.taken_at,
            latency={name: _latency(oldest, now, metric) for name, metric in HISTOGRAMS.items()},
            finished=_counts(now, "blink_request_success_total"),
            rejected=_counts(now, "blink_requests_rejected_total"),
            engine_losses=_counts(now, "blink_engine_losses_total"),
            lanes=_lanes(before, now, seconds),
        )


def _latency(before: Scrape, now: Scrape, name: str) -> Latency:
    buckets = {float(bound): count for bound, count in increase(before, now, f"{name}_bucket").items()}
    count = int(sum(increase(before, now, f"{name}_count").values()))

    def at(share: float) -> float | None:
        seconds = quantile(buckets, share)
        return None if seconds is None else seconds * 1e3

    return Latency(at(0.5), at(0.99), count)


def _prefix_hit_rate(before: Scrape, now: Scrape) -> float | None:
    queries, hits = (
        sum(increase(before, now, f"blink_prefix_cache_{name}_total").values()) for name in ("queries", "hits")
    )
    return hits / queries if queries else None


def _counts(now: Scrape, name: str) -> dict[str, int]:
    return {label: int(count) for label, count in now.by_label(name).items() if count}


def _lanes(before: Scrape, now: Scrape, seconds: float) -> list[Lane]:
    grown = increase(before, now, "blink_lane_generation_tokens_total")

    def of(name: str) -> Callable[[str], int]:
        values = now.by_label(f"blink_lane_{name}")
        return lambda lane: int(values.get(lane, 0))

    running, waiting, backlog = of("requests_running"), of("requests_waiting"), of("log_backlog")
    tokens = of("generation_tokens_total")
    return [
        Lane(
            int(lane),
            bool(attached),
            running(lane),
            waiting(lane),
            tokens(lane),
            grown.get(lane, 0.0) / seconds,
            backlog(lane),
        )
        for lane, attached in sorted(now.by_label("blink_lane_attached").items(), key=lambda item: int(item[0]))
    ]
