"""What a scrape of /metrics costs beside open streams, and what it does to them, in a product that serves."""

from __future__ import annotations

import http.client
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np

from services.cli.bench.fleet import fleet
from services.cli.bench.target import Target
from services.cli.bench.workload import Request

PROMPT_TOKENS = 16
SPREAD = 0.5  # seconds in which the streams begin
INTERVAL = 0.1  # seconds between two scrapes
OPEN = re.compile(rb"^blink_gateway_open_requests(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Streamed:
    """One run of streams.

    Attributes:
        scrapes: seconds of each scrape that found all streams open.
        gap: seconds between two arrivals of a stream's tokens, 99th percentile.
        failed: streams not answered in full, by what they failed with.
    """

    scrapes: list[float]
    gap: float
    failed: dict[str, int]


def open_requests(figures: bytes) -> int:
    """In all workers, by a scrape's body. Raises ValueError when it does not say."""
    found = OPEN.findall(figures)
    if not found:
        raise ValueError("the metrics have no blink_gateway_open_requests")
    return int(sum(map(float, found)))


def stream(target: Target, streams: int, tokens: int, processes: int, url: str | None, seed: int) -> Streamed:
    """Open so many streams of ``tokens`` each by gRPC and read them to their ends; with ``url`` scrape meanwhile.

    Scrapes are timed in the caller's thread, the streams are read in ``processes`` others.
    """
    requests = [Request(SPREAD * n / streams, PROMPT_TOKENS, tokens, seed + n) for n in range(streams)]
    scrapes: list[float] = []
    with fleet(processes, target) as readers, ThreadPoolExecutor(1) as pool:
        running = pool.submit(readers.run, requests)
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10) if url else None
        while connection and not running.done():
            began = time.perf_counter()
            connection.request("GET", "/metrics")
            body = connection.getresponse().read()
            seconds = time.perf_counter() - began
            if open_requests(body) == streams:
                scrapes.append(seconds)
            time.sleep(INTERVAL)
        outcomes = [outcome for share in running.result() for outcome in share.outcomes]
    gaps = [gap for outcome in outcomes for gap in outcome.gaps]
    short = [outcome for outcome in outcomes if not outcome.good or outcome.output_tokens != tokens]
    failed = Counter(outcome.error or f"{outcome.output_tokens} tokens of {tokens}" for outcome in short)
    return Streamed(scrapes, float(np.percentile(gaps, 99)) if gaps else float("nan"), dict(failed))
