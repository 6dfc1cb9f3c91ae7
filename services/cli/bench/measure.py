"""One load point: repeats of it, and their figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from services.cli.bench.generator import Share
from services.cli.bench.outcome import Outcome
from services.cli.bench.report import ClientHealth, Interference, Latency, Point, Slo, Value
from services.cli.bench.statistics import interval

PERCENTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0, "p999": 99.9}
MAX_BUSY = 0.9  # of a core, for a process of the load generator that is still believed


@dataclass(frozen=True)
class Repeat:
    """One run of a load."""

    shares: Sequence[Share]
    host_cpu_seconds: float | None
    gpu_joules: float | None

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for share in self.shares for outcome in share.outcomes]


def summarize(
    load: float, repeats: Sequence[Repeat], slo: Slo | None, max_lateness: float, interference: Interference | None
) -> Point:
    """The report's point. ``max_lateness`` is seconds, of the load generator's 99th percentile."""
    sent = [repeat.outcomes for repeat in repeats]
    answered = [[outcome for outcome in outcomes if outcome.good] for outcomes in sent]
    spans = [_span(outcomes) for outcomes in sent]
    tokens = [sum(outcome.output_tokens for outcome in outcomes) for outcomes in sent]
    kept = [sum(meets(outcome, slo) for outcome in outcomes) for outcomes in answered] if slo else None

    def latency(values: Callable[[Outcome], Iterable[float | None]]) -> Latency | None:
        of_repeats = [
            np.array([value for outcome in outcomes for value in values(outcome) if value is not None])
            for outcomes in answered
        ]
        return _latency([values for values in of_repeats if values.size])

    return Point(
        load=load,
        repeats=len(repeats),
        requests=sum(map(len, sent)),
        failed=Counter(outcome.error or "no token" for outcomes in sent for outcome in outcomes if not outcome.good),
        prompt_tokens=sum(outcome.prompt_tokens for outcomes in sent for outcome in outcomes),
        output_tokens=sum(tokens),
        offered_requests_per_s=_offered(sent),
        requests_per_s=_ratios([len(outcomes) for outcomes in answered], spans),
        output_tokens_per_s=_ratios(tokens, spans),
        goodput_requests_per_s=_ratios(kept, spans) if kept else None,
        slo_share=_ratios(kept, [len(outcomes) for outcomes in sent]) if kept else None,
        ttft_ms=latency(lambda outcome: (outcome.ttft,)),
        tpot_ms=latency(lambda outcome: (outcome.tpot,)),
        itl_ms=latency(lambda outcome: outcome.gaps),
        end_to_end_ms=latency(lambda outcome: (outcome.end_to_end,)),
        host_cpu_us_per_token=_per_token([repeat.host_cpu_seconds for repeat in repeats], tokens, 1e6),
        gpu_joules_per_token=_per_token([repeat.gpu_joules for repeat in repeats], tokens, 1.0),
        client=_health(repeats, max_lateness),
        interference=interference,
    )


def meets(outcome: Outcome, slo: Slo) -> bool:
    """Whether an answered request kept every limit that there is."""
    return (slo.ttft_ms is None or outcome.ttft * 1e3 <= slo.ttft_ms) and (
        slo.tpot_ms is None or (outcome.tpot or 0.0) * 1e3 <= slo.tpot_ms
    )


def _health(repeats: Sequence[Repeat], max_lateness: float) -> ClientHealth:
    lateness = np.array([outcome.lateness for repeat in repeats for outcome in repeat.outcomes]) * 1e3
    delays = np.array([delay for repeat in repeats for share in repeat.shares for delay in share.loop_delays] or [0.0])
    late, delayed = float(np.percentile(lateness, 99)), float(np.percentile(delays, 99)) * 1e3
    busy = max(share.cpu_seconds / share.wall_seconds for repeat in repeats for share in repeat.shares)
    return ClientHealth(
        ok=max(late, delayed) <= max_lateness * 1e3 and busy <= MAX_BUSY,
        lateness_p99_ms=late,
        lateness_max_ms=float(lateness.max()),
        loop_delay_p99_ms=delayed,
        busy_max=busy,
        processes=len(repeats[0].shares),
    )


def _span(outcomes: Sequence[Outcome]) -> float:
    """Seconds from the first sending to the last end."""
    return max(outcome.ended for outcome in outcomes) - min(outcome.sent for outcome in outcomes)


def _offered(repeats: Sequence[Sequence[Outcome]]) -> Value | None:
    """By the gaps between scheduled times; None where there are none."""
    times = [[outcome.scheduled for outcome in outcomes] for outcomes in repeats]
    spans = [max(each) - min(each) for each in times]
    return _ratios([len(each) - 1 for each in times], spans) if all(spans) else None


def _value(values: Sequence[float]) -> Value:
    low, high = interval(values) or (None, None)
    return Value(mean=fmean(values), low=low, high=high)


def _ratios(amounts: Sequence[float], units: Sequence[float]) -> Value:
    return _value([amount / unit for amount, unit in zip(amounts, units, strict=True)])


def _latency(repeats: Sequence[NDArray[np.float64]]) -> Latency | None:
    """``repeats``: seconds."""
    if not repeats:
        return None
    at = {name: [float(np.percentile(values, q)) * 1e3 for values in repeats] for name, q in PERCENTILES.items()}
    return Latency(
        samples=sum(values.size for values in repeats),
        mean=_value([float(values.mean()) * 1e3 for values in repeats]),
        **{name: _value(values) for name, values in at.items()},
    )


def _per_token(amounts: Sequence[float | None], tokens: Sequence[int], scale: float) -> Value | None:
    pairs = zip(amounts, tokens, strict=True)
    values = [amount / count * scale for amount, count in pairs if amount is not None and count]
    return _value(values) if values else None
