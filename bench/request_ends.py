"""What requests that end together cost the control loop, on the GPU: ``python -m bench.request_ends``.

Half of the running requests are cancelled while one step runs; they leave between it and the next. That gap, less the
usual one, is what the ends cost: log entries, pages, references of the prefix cache, and with shared answers a hash.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.control_loop import LANES, PROMPT, TimedStep, bench_engine
from services.ring.schema import DescriptorFlag, FinishReason, record_bytes
from tests.gpu.serving import finish
from tests.gpu_engine.core.machine import record

ANSWER = 3000  # tokens that a request may take: it is cancelled long before
STEP_US = 4000  # so that all cancels arrive in one step
CACHES = {"off": (False, False), "exact": (True, False), "all": (True, True)}


def measure(rows: int, prompt_tokens: int, cache: str) -> tuple[int, float, float]:
    """How many ended after one step, the gap behind it and the usual gap, µs."""
    prefix_cache, share_decoded = CACHES[cache]
    step = TimedStep(STEP_US)
    span = record_bytes(prompt_tokens, ANSWER)
    with bench_engine(
        step,
        rows,
        prompt_tokens - len(PROMPT) + ANSWER,
        prefix_cache=prefix_cache,
        share_decoded=share_decoded,
        budget=4096,
    ) as engine:
        gateways = [engine.attach(lane) for lane in range(LANES)]
        asked = []
        for request in range(rows):
            gateway, slot = gateways[request % LANES], request // LANES
            prompt = [request + 1, *range(2, prompt_tokens + 1)]
            packed = record(prompt, slot=slot, max_tokens=ANSWER, seed=request, flags=DescriptorFlag.IGNORE_EOS)
            asked.append((gateway, slot, gateway.submit(packed, slot * span)))
        while not all(len(gateway.stream(position).tokens) > 40 for gateway, _, position in asked):
            for gateway in gateways:
                gateway.read()
        for part in (asked[: rows // 2], asked[rows // 2 :]):
            for gateway, slot, position in part:
                gateway.client.cancel(slot, position)
            time.sleep(30 * STEP_US / 1e6)
        finish(*gateways)
        assert all(gateway.stream(position).reason is FinishReason.CANCELLED for gateway, _, position in asked)
        steps = int(engine.status().engine["steps"])
        engine.stop()
        times = step.times()[:steps]
    gaps = (times["begin"][1:].astype(np.int64) - times["end"][:-1].astype(np.int64)) / 1e3
    running = times["rows"].astype(np.int64)
    ended = running[:-1] - running[1:]
    most = int(ended.argmax())
    usual = (running[:-1] == rows) & (ended == 0)
    return int(ended[most]), float(gaps[most]), float(np.median(gaps[usual]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 256], help="running requests")
    parser.add_argument("--prompts", type=int, nargs="*", default=[64, 512, 2048], help="tokens of a prompt")
    arguments = parser.parse_args()
    table = Table(title="Requests that end together (GPU's global timer)")
    for name in ("running", "prompt", "prefix_cache", "ended", "gap, µs", "usual gap, µs", "µs an end"):
        table.add_column(name, justify="right")
    for rows in arguments.rows:
        for prompt in arguments.prompts:
            for cache in CACHES:
                ended, gap, usual = measure(rows, prompt, cache)
                each = (gap - usual) / ended
                table.add_row(str(rows), str(prompt), cache, str(ended), f"{gap:.1f}", f"{usual:.1f}", f"{each:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
