"""The cuda engine at the ring, random bf16 weights: ``python -m bench.cuda_engine [--models NAME ...]``.

Decode: requests of 128 prompt tokens and 128 generated ones, all submitted at once; the median time between tokens of
the last one while all run. Prefill and time to first token: from the doorbell to the first token, seen by a process
that polls the ring. Start: from a checkpoint in memory to READY.
"""

from __future__ import annotations

import itertools
import statistics
import time

import numpy as np

from bench.families import MODELS, RandomWeights, parser_of
from services.gpu_engine.engine import EngineLimits
from services.gpu_engine.models.config import ModelConfig
from tests.gpu.model_serving import Client, serving_model

PROMPT, GENERATED = 128, 128
BATCHES = (1, 32, 128, 256)
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


def decode_ms(client: Client, batch: int) -> float:
    """Median milliseconds between tokens of the last request while the whole batch decodes."""
    streams = [client.submit(prompt(PROMPT), GENERATED) for _ in range(batch)]
    last, seen = streams[-1], []
    count = 0
    while client.read():
        if len(last.tokens) > count:
            count = len(last.tokens)
            seen.append((count, time.perf_counter()))
        if streams[0].reason is not None:
            break
    client.finish()
    assert all(len(stream.tokens) == GENERATED for stream in streams)
    gaps = [(b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(seen[4:])]
    return 1e3 * statistics.median(gaps)


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


def measure(config: ModelConfig) -> None:
    weights = RandomWeights(config)
    began = time.perf_counter()
    with serving_model(weights, LIMITS) as client:
        print(f"start to READY                    {time.perf_counter() - began:8.2f} s", flush=True)
        first_token_ms(client, 50)
        print(f"first token, 50 prompt tokens     {first_token_ms(client, 50):8.2f} ms", flush=True)
        print(f"first token, 2,048 prompt tokens  {first_token_ms(client, 2048):8.2f} ms", flush=True)
        for batch in BATCHES:
            times = [decode_ms(client, batch) for _ in range(2)]
            print(
                f"decode step, batch {batch:3}            " + " ".join(f"{ms:8.2f}" for ms in times) + " ms", flush=True
            )


def main() -> None:
    for name in parser_of(__doc__).parse_args().models:
        print(f"\n{name}", flush=True)
        measure(MODELS[name])


if __name__ == "__main__":
    main()
