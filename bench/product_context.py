"""Whole steps by how their products are chosen: ``python -m bench.product_context``, Llama-3-8B, about 70 s.

A step is one graph, replayed while the control loop's multiprocessor is occupied, all variants in turns; medians. Each
variant runs without and with ``carve_out(100)`` (driver.py). Products are computed by

- library first: cuBLASLt's first choices, which may split k;
- library in context: cuBLASLt's, which up to 64 tokens may split k, chosen by the time of the step (choosing.py);
- in order first: the first ways in the engine's order of summation;
- in order alone: those that are fastest launched over and over;
- in order in context: those chosen by the time of the step, whose counts are zero, as at the start of an engine;
- in order in context, real step: the same, chosen with the step that is then timed.

All those in order must give the same logits, else it exits with 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.gpu_kernels import random_step
from bench.machine import write_json
from bench.random_model import RandomModel
from services.gpu_engine.cuda.choosing import choose, excerpt_of
from services.gpu_engine.cuda.compiler import Compiler, default_cache
from services.gpu_engine.cuda.cublas_lt import CublasLt, Operands, Shape
from services.gpu_engine.cuda.driver import carve_out
from services.gpu_engine.cuda.executor import StepExecutor
from services.gpu_engine.cuda.holds import Holds
from services.gpu_engine.cuda.products import MatrixProducts, WideWays
from services.gpu_engine.cuda.skinny_gemm import SkinnyGemm
from services.gpu_engine.cuda.step_arrays import StepArrays, StepLimits
from services.gpu_engine.cuda.step_clock import Captured, StepClock
from services.gpu_engine.cuda.wide_swiglu import WideSwiglu

CONTEXT = 192
TOKENS, ROWS, PAGES_PER_SEQUENCE = 2048, 256, 128
CARVE_OUTS = (None, 100)  # percent
IN_ORDER = "in order"

Seen = Mapping[Shape, Sequence[Operands]]


@dataclass(frozen=True)
class Chooser:
    """A way to choose.

    Attributes:
        own: our own kernels are among the candidates, and the order of summation is kept.
        empty: the step's counts are zero meanwhile.
    """

    name: str
    own: bool
    choose: Callable[[MatrixProducts, Seen, Callable[..., None]], None]
    empty: bool = False


@dataclass(frozen=True)
class Variant:
    """A step as it was captured. ``products`` and its memory must live as long."""

    captured: Captured
    logits: NDArray[np.float32]
    products: MatrixProducts


class ContextBench:
    """A random Llama-3-8B whose steps run with products chosen in any way."""

    def __init__(self) -> None:
        self.model = RandomModel("llama3-8b")
        self.device = self.model.device
        self.compiler = Compiler(self.device.arch, default_cache())
        self.clock = StepClock(Holds(self.compiler))
        self.library = CublasLt(self.device)
        self.pages = ROWS * -(-CONTEXT // self.model.geometry.page_size)
        self.arrays = StepArrays(StepLimits(TOKENS, ROWS, PAGES_PER_SEQUENCE))
        self.kernels = {percent: self._kernels(percent) for percent in CARVE_OUTS}
        self.choosers = (
            Chooser("library first", False, self._library_first),
            Chooser("library in context", False, self._in_context, empty=True),
            Chooser(f"{IN_ORDER} first", True, self._in_order_first),
            Chooser(f"{IN_ORDER} alone", True, self._alone),
            Chooser(f"{IN_ORDER} in context", True, self._in_context, empty=True),
            Chooser(f"{IN_ORDER} in context, real step", True, self._in_context),
        )

    def _kernels(self, percent: int | None) -> tuple[StepExecutor, Callable[[], MatrixProducts]]:
        """A step's kernels, and what makes products that have our own kernels."""
        with carve_out(percent):
            executor = self.model.executor(self.arrays, self.pages, self.compiler)
            skinny, kernel = SkinnyGemm(self.device, self.compiler), WideSwiglu(self.device, self.compiler)
        executor.activations.randomize()
        wide = WideWays(kernel, executor.kernels.swiglu, executor.activations.gate_up)
        return executor, lambda: MatrixProducts(self.device, skinny, wide=wide)

    def upload(self, tokens: int) -> int:
        """The same step for the same ``tokens``: of so many rows that decode, or a prompt where that is more than ROWS.

        Returns:
            How many are sampled.
        """
        rng = np.random.default_rng(tokens)
        rows = [(CONTEXT - 1, 1)] * tokens if tokens <= ROWS else [(0, tokens)]
        table = np.zeros((ROWS, PAGES_PER_SEQUENCE), np.int32)
        free = rng.permutation(self.pages).astype(np.int32)
        for line, (computed, count) in enumerate(rows):
            needed = -(-(computed + count) // self.model.geometry.page_size)
            table[line, :needed], free = free[:needed], free[needed:]
        self.arrays.upload(random_step(rng, table, self.model.config.vocabulary, rows))
        return len(rows)

    def variant(self, chooser: Chooser, percent: int | None, tokens: int) -> Variant:
        executor, own = self.kernels[percent]
        products = executor.products = own() if chooser.own else MatrixProducts(self.device, None)
        sampled, stream = self.upload(tokens), self.clock.stream

        def launch(**layers: Any) -> None:
            executor.launch(stream, tokens, min(tokens, ROWS), **layers)

        if chooser.empty:
            self.arrays.counts.fill(0)
        began = time.monotonic()
        with products.observing() as seen:
            launch()
        chooser.choose(products, seen, launch)
        name = f"{chooser.name}{f', carve-out {percent}' if percent else ''}"
        print(f"{tokens:5} tokens, {name:48} chosen in {time.monotonic() - began:6.2f} s", flush=True)
        self.upload(tokens)
        captured = self.clock.capture(lambda _: launch())
        logits = executor.activations.logits.download(np.float32, (sampled, self.model.config.vocabulary))
        return Variant(Captured(captured.graph, 1), logits, products)

    def _library_first(self, products: MatrixProducts, seen: Seen, _launch: Callable[..., None]) -> None:
        for shape in seen:
            products.ways[shape] = self.library.candidates(shape, split=True)[0]

    def _in_order_first(self, products: MatrixProducts, seen: Seen, _launch: Callable[..., None]) -> None:
        for shape, operands in seen.items():
            products.ways[shape] = products.in_order(self.clock.stream, shape, operands[0])[0]

    def _alone(self, products: MatrixProducts, seen: Seen, _launch: Callable[..., None]) -> None:
        ways = {shape: products.in_order(self.clock.stream, shape, operands[0]) for shape, operands in seen.items()}
        for shape, times in self.clock.alone(products, seen, ways).items():
            products.ways[shape] = min(times, key=times.__getitem__)

    def _in_context(self, products: MatrixProducts, seen: Seen, launch: Callable[..., None]) -> None:
        layers = excerpt_of(self.model.layers)
        choose(products, seen, lambda _: launch(layers=layers), self.clock, {})

    def measure(self, tokens: int, rounds: int) -> dict[str, Any]:
        """Milliseconds and ways by chooser and carve-out; exits with 1 when logits differ."""
        variants = {
            (chooser.name, percent): self.variant(chooser, percent, tokens)
            for percent in CARVE_OUTS
            for chooser in self.choosers
        }
        same = [variant.logits for (name, _), variant in variants.items() if name.startswith(IN_ORDER)]
        if not all(np.array_equal(logits, same[0]) and np.isfinite(logits).all() for logits in same):
            sys.exit(f"{tokens} tokens: logits differ between ways that should keep the order of summation")
        times: dict[tuple[str, int | None], list[float]] = {key: [] for key in variants}
        for _ in range(rounds):
            with self.clock.beside_the_loop():
                for key, variant in variants.items():
                    times[key].append(1e3 * self.clock.replay(variant.captured))
        print(f"\n{tokens} tokens, ms a step: without, with carve-out 100")
        found: dict[str, Any] = {}
        for chooser in self.choosers:
            ms = {percent: statistics.median(times[chooser.name, percent][1:]) for percent in CARVE_OUTS}
            print(f"  {chooser.name:32} {ms[None]:9.3f} {ms[100]:9.3f}", flush=True)
            found[chooser.name] = {
                str(percent): {
                    "ms": ms[percent],
                    "ways": {
                        str(tuple(shape)): way for shape, way in variants[chooser.name, percent].products.ways.items()
                    },
                }
                for percent in CARVE_OUTS
            }
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 32, 128, 256, TOKENS])
    parser.add_argument("--rounds", type=int, default=9, help="replays of each variant")
    parser.add_argument("--seconds", type=float, default=90.0, help="no further number of tokens is begun after these")
    parser.add_argument("--json", type=Path, help="write results there too, after each number of tokens")
    arguments, found, began = parser.parse_args(), {}, time.monotonic()
    bench = ContextBench()
    print(f"{bench.device.name}, ready in {time.monotonic() - began:.1f} s", flush=True)
    for tokens in arguments.tokens:
        if time.monotonic() - began > arguments.seconds:
            print(f"no time is left for {tokens} tokens")
            continue
        found[str(tokens)] = bench.measure(tokens, arguments.rounds)
        write_json(arguments.json, "product_context", found)


if __name__ == "__main__":
    main()
