"""The cuda engine at the ring, random bf16 weights: ``python -m bench.cuda_engine [--models NAME ...]``.

Decode: requests of 128 prompt tokens and 128 generated ones, all submitted at once; the median time between tokens of
the last one while all run; and, from its first token to the end, the GPU's mean power and its energy for each token of
that time (NVML, by nvidia-ml-py). Prefill and time to first token: from the doorbell to the first token, seen by a
process that polls the ring. Start: from a checkpoint in memory to READY.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.families import MODELS, RandomWeights, parser_of
from bench.machine import EnergyMeter, write_json
from services.gpu_engine.engine import EngineLimits
from services.gpu_engine.models.config import ModelConfig
from tests.gpu.model_serving import Client, serving_model

PROMPT, GENERATED = 128, 128
BATCHES = (1, 32, 128, 256)
PROMPTS = (50, 2048, 7000)
LIMITS = EngineLimits(
    context=4096,
    page_size=16,
    kv_pages=8192,
    max_running=256,
    max_batched_tokens=2048,
    max_waiting=1024,
    lease_timeout_ms=10_000,
)
REPEATS = 5


def prompt(tokens: int) -> list[int]:
    smallest = min(config.vocabulary for config in MODELS.values())
    ids: list[int] = np.random.default_rng().integers(0, smallest, tokens).tolist()
    return ids


@dataclass(frozen=True)
class Decode:
    """How a batch decodes.

    Attributes:
        ms: median between tokens of the last request while all run.
        watts: of the GPU, the mean over that time; NaN where NVML gives none.
        mj_per_token: energy of that time for each token of any request in it.
    """

    ms: float
    watts: float
    mj_per_token: float


def decode(client: Client, batch: int, meter: EnergyMeter) -> Decode:
    streams = [client.submit(prompt(PROMPT), GENERATED) for _ in range(batch)]
    last, seen = streams[-1], []
    count = 0
    while not last.tokens:
        client.read()
    before, began, joules = sum(len(stream.tokens) for stream in streams), time.perf_counter(), meter.joules()
    while client.read():
        if len(last.tokens) > count:
            count = len(last.tokens)
            seen.append((count, time.perf_counter()))
        if streams[0].reason is not None:
            break
    client.finish()
    joules, seconds = meter.joules() - joules, time.perf_counter() - began
    assert all(len(stream.tokens) == GENERATED for stream in streams)
    gaps = [(b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(seen[4:])]
    return Decode(1e3 * statistics.median(gaps), joules / seconds, 1e3 * joules / (batch * GENERATED - before))


def first_token_ms(client: Client, tokens: int) -> float:
    times = []
    for _ in range(REPEATS):
        ids = prompt(tokens)
        began = time.perf_counter()
        stream = client.submit(ids, 1)
        while not stream.tokens:
            client.read()
        times.append(time.perf_counter() - began)
        client.finish()
    return 1e3 * statistics.median(times)


def measure(config: ModelConfig) -> dict[str, Any]:
    weights = RandomWeights(config)
    limits = replace(LIMITS, context=min(config.context, max(LIMITS.context, PROMPTS[-1] + 1)))
    meter, began = EnergyMeter(), time.perf_counter()
    with serving_model(weights, limits) as client:
        found: dict[str, Any] = {"start_s": time.perf_counter() - began}
        print(f"start to READY                    {found['start_s']:8.2f} s", flush=True)
        first_token_ms(client, PROMPTS[0])
        for tokens in (tokens for tokens in PROMPTS if tokens < limits.context):
            taken = found[f"first_token_{tokens}_ms"] = first_token_ms(client, tokens)
            print(f"first token, {tokens:5,} prompt tokens  {taken:8.2f} ms", flush=True)
        for batch in BATCHES:
            runs = [decode(client, batch, meter) for _ in range(2)]
            found[f"decode_{batch}"] = [asdict(run) for run in runs]
            print(
                f"decode step, batch {batch:3}            "
                + "   ".join(f"{run.ms:6.2f} ms {run.watts:4.0f} W {run.mj_per_token:7.1f} mJ/token" for run in runs),
                flush=True,
            )
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=Path, help="write results there too")
    arguments, found = parser.parse_args(), {}
    for name in arguments.models:
        print(f"\n{name}", flush=True)
        found[name] = measure(MODELS[name])
    write_json(arguments.json, "cuda_engine", found)


if __name__ == "__main__":
    main()
