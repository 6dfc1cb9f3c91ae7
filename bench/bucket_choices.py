"""What choosing in full at a few buckets saves and costs: ``python -m bench.bucket_choices``, Llama-3-8B, about 90 s.

Chooses the products of all buckets as the first start of an engine does, and then in full at every bucket, twice with
``--again``: how far apart two full choices are is the noise of the comparison. The first choosing also loads the
library's kernels. Then times real steps of each bucket, one graph each, replayed in turns while the control loop's
multiprocessor is occupied; medians. Sampled rows must have the same logits in all, else it exits with 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import write_json
from bench.product_context import ROWS, TOKENS, ContextBench
from services.gpu_engine.cuda.choosing import anchors_of, excerpt_of
from services.gpu_engine.cuda.driver import Stream
from services.gpu_engine.cuda.graph_cache import default_buckets
from services.gpu_engine.cuda.products import MatrixProducts
from services.gpu_engine.cuda.step_clock import Captured
from services.gpu_engine.cuda.warm_up import warm_up
from services.gpu_engine.models.family import Layer


class BucketBench:
    """Steps of one model by the products that compute them."""

    def __init__(self) -> None:
        self.bench = ContextBench()
        self.executor, self._own = self.bench.kernels[None]

    def chosen(self, buckets: Sequence[int], anchors: Sequence[int]) -> MatrixProducts:
        """Products of ``buckets``, chosen in full at ``anchors``."""
        self.bench.arrays.counts.fill(0)
        products = self.executor.products = self._own()
        excerpt = partial(self._record, layers=excerpt_of(self.bench.model.layers))
        warm_up(self.bench.compiler, products, buckets, self._record, excerpt, anchors=anchors)
        return products

    def step(self, bucket: int, products: MatrixProducts) -> tuple[Captured, Any]:
        """A real step of so many tokens, and its logits."""
        self.executor.products = products
        sampled = self.bench.upload(bucket)
        self.executor.activations.logits.fill(0xFF)  # NaN, which equals nothing
        captured = self.bench.clock.capture(lambda stream: self._record(stream, bucket))
        vocabulary = self.bench.model.config.vocabulary
        return captured, self.executor.activations.logits.download(np.float32, (sampled, vocabulary))

    def milliseconds(self, steps: dict[str, Captured], rounds: int) -> dict[str, float]:
        """Medians of ``rounds`` samples of each, in turns, all of as many replays; one more comes before."""
        replays = min(step.replays for step in steps.values())
        times: dict[str, list[float]] = {name: [] for name in steps}
        with self.bench.clock.beside_the_loop():
            for _ in range(rounds + 1):
                for name, step in steps.items():
                    times[name].append(1e3 * self.bench.clock.replay(replace(step, replays=replays)))
        return {name: statistics.median(taken[1:]) for name, taken in times.items()}

    def _record(self, stream: Stream, bucket: int, layers: Sequence[Layer] | None = None) -> None:
        self.executor.launch(stream, bucket, min(bucket, ROWS), layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="choose in full a second time")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each step")
    parser.add_argument("--json", type=Path, help="write results there too")
    arguments = parser.parse_args()
    buckets, bench = default_buckets(TOKENS), BucketBench()
    anchors = {"anchors": anchors_of(buckets), "full": buckets} | ({"full again": buckets} if arguments.again else {})
    chosen: dict[str, MatrixProducts] = {}
    chosen_s: dict[str, float] = {}
    steps_ms: dict[str, dict[str, float]] = {}
    for name, in_full in anchors.items():
        began = time.monotonic()
        chosen[name] = bench.chosen(buckets, in_full)
        chosen_s[name] = time.monotonic() - began
        print(f"{name:10} {len(in_full):2} buckets in full: {chosen_s[name]:6.2f} s", flush=True)
    print("\ntokens  ways unlike full's  ms a step, and of full's: " + ", ".join(chosen))
    ratios: dict[str, list[float]] = {name: [] for name in chosen}
    for bucket in buckets:
        steps, logits = {}, []
        for name, products in chosen.items():
            steps[name], sampled = bench.step(bucket, products)
            logits.append(sampled)
        if not all(np.array_equal(other, logits[0]) for other in logits):
            sys.exit(f"{bucket} tokens: logits differ between ways that should keep the order of summation")
        ms = steps_ms[str(bucket)] = bench.milliseconds(steps, arguments.rounds)
        full, ours = chosen["full"].ways, chosen["anchors"].ways
        unlike = sum(ours[shape] != way for shape, way in full.items() if shape.m == bucket)
        for name, taken in ms.items():
            ratios[name].append(taken / ms["full"])
        columns = "  ".join(f"{taken:8.3f} {taken / ms['full']:6.3f}" for taken in ms.values())
        print(f"{bucket:6}{'*' if bucket in anchors['anchors'] else ' '} {unlike:18}  {columns}", flush=True)
    for name, of_full in ratios.items():
        print(f"{name}: {statistics.mean(of_full):.4f} of full's time in the mean, {max(of_full):.4f} at most")
    write_json(arguments.json, "bucket_choices", {"chosen_s": chosen_s, "steps_ms": steps_ms})


if __name__ == "__main__":
    main()
