"""The last seconds of a pool's gateways."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from services.colocation.decision.model import Reading
from services.colocation.errors import ScrapeError
from services.common.histogram import add, increase, quantile

TTFT = "blink_time_to_first_token_seconds"
TPOT = "blink_request_time_per_output_token_seconds"
P99 = 0.99

Gateway = tuple[str, str]  # its URL and the address that it was reached at


@dataclass(frozen=True, slots=True)
class Scrape:
    """One gateway's histograms at one time: counts up to each bound, of all models."""

    ttft: dict[float, float]
    tpot: dict[float, float]


def parse(text: str) -> Scrape:
    """Read an answer of ``/metrics``. Raises ScrapeError when it is none of a Blink gateway's."""
    found: dict[str, dict[float, float]] = {}
    engine_seen = False
    try:
        for family in text_string_to_metric_families(text):
            engine_seen |= family.name == "blink_engine_state"
            if family.name in {TTFT, TPOT}:
                buckets = found.setdefault(family.name, {})
                for sample in family.samples:
                    if sample.name.endswith("_bucket"):
                        if not 0 <= sample.value < math.inf:
                            raise ValueError(f"{sample.name} is {sample.value:g}, which counts nothing")
                        add(buckets, {float(sample.labels["le"]): sample.value})
    except (ValueError, KeyError) as error:
        raise ScrapeError(f"not Prometheus's text format: {error}") from error
    if not engine_seen and not found:
        raise ScrapeError("no metrics of a Blink gateway")
    return Scrape(found.get(TTFT, {}), found.get(TPOT, {}))


@dataclass
class SlidingWindow:
    """Increases of all gateways over the last ``seconds``; times are of a monotonic clock."""

    seconds: float
    _last: dict[Gateway, Scrape] = field(default_factory=dict)
    _steps: deque[tuple[float, Scrape]] = field(default_factory=deque)
    _silent: set[Gateway] = field(default_factory=set)
    _complete: bool = False

    def take(self, now: float, scrapes: dict[Gateway, Scrape], silent: Collection[Gateway] = ()) -> None:
        """Add what gateways, by address, answered at ``now``; ``silent`` are those that did not.

        What a gateway had counted before it was first seen, or while it was silent, is not of this window, unless it
        came while others were watched: then it is new, and all that it counts is.
        """
        step = Scrape({}, {})
        for address, scrape in scrapes.items():
            new = bool(self._last) and address not in self._silent
            before = self._last.get(address) or (Scrape({}, {}) if new else scrape)
            add(step.ttft, increase(before.ttft, scrape.ttft))
            add(step.tpot, increase(before.tpot, scrape.tpot))
        self._complete = bool(self._last)
        self._last, self._silent = scrapes, set(silent)
        self._steps.append((now, step))
        while self._steps and self._steps[0][0] <= now - self.seconds:
            self._steps.popleft()

    def forget(self) -> None:
        """Nothing is known any more."""
        self._last, self._silent, self._complete = {}, set(), False
        self._steps.clear()

    def reading(self) -> Reading | None:
        """P99 over the window; None before there are two scrapes to compare."""
        if not self._complete:
            return None
        ttft: dict[float, float] = {}
        tpot: dict[float, float] = {}
        for _, step in self._steps:
            add(ttft, step.ttft)
            add(tpot, step.tpot)
        return Reading(quantile(ttft, P99), quantile(tpot, P99))
