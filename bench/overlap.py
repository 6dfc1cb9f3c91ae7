"""Where launches that overlap gain or lose: ``python -m bench.overlap``, Llama-3-8B's decode steps, about 35 s.

A whole step is one graph; a kernel "overlaps" when it may begin before the one before it has ended (programmatic
dependent launch). Measured: no kernel, all, each alone, all but each, each with its successor; when a kernel lets the
next one begin (BLINK_TRIGGER of kernels/dependent_launch.cuh); and products whose rings leave room for a second block
on a multiprocessor, which lets two kernels' products share it. Each variant's logits must have the bits of the first's.

The variants that tell the most come first: what is not done within --seconds is left out. A variant's name is printed
before it runs, so one that faults is known.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.gpu_kernels import random_step
from bench.machine import write_json
from bench.random_model import RandomModel
from bench.timing import replay_seconds
from services.gpu_engine.cuda.compiler import Compiler, default_cache
from services.gpu_engine.cuda.cublas_lt import Operands, Shape
from services.gpu_engine.cuda.driver import Device, Stream
from services.gpu_engine.cuda.executor import StepExecutor
from services.gpu_engine.cuda.products import SKINNY, MatrixProducts
from services.gpu_engine.cuda.skinny_gemm import SkinnyGemm
from services.gpu_engine.cuda.skinny_schedule import RING_BYTES, Schedule
from services.gpu_engine.cuda.step_arrays import StepArrays, StepLimits

CONTEXT = 192
HALF_RING = 104 << 10  # two blocks share a multiprocessor
EARLY, AFTER_WAIT, AT_END = 0, 1, 2  # BLINK_TRIGGER

OF_LAYER = ("first norm", "qkv", "rotary", "attention", "output", "second norm", "gate-up", "down")
OF_STEP = ("embedding", "final norm", "logits", "sample")
PLACES = OF_LAYER + OF_STEP
PRODUCTS = ("skinny_gemm.cu",)
SMALL = ("embedding.cu", "rms_norm.cu", "rotary.cu", "swiglu.cu", "plan_attention.cu", "sampling.cu")


class PlacedStream(Stream):
    """A stream on which a kernel overlaps by its place in the step.

    Attributes:
        places: of PLACES, whose launches overlap; a product that the library computes has none.
    """

    def __init__(self) -> None:
        super().__init__(overlap=True)
        self.places: Collection[str] = ()
        self._place = ""

    def overlaps(self, kernel: str) -> bool:
        self._place = place_of(kernel, self._place)
        return self._place in self.places


def place_of(kernel: str, before: str) -> str:
    """The place of a launch, given the place of the one before it that waits for its predecessor."""
    match kernel:
        case "rms_norm":
            return "first norm"
        case "add_rms_norm":
            return "second norm" if before in ("attention", "output") else "first norm"
        case "skinny_store":
            return {"first norm": "qkv", "attention": "output"}.get(before, "down")
        case _:
            if kernel.endswith("swiglu"):
                return "gate-up"
            return "logits" if kernel == "skinny_logits" else kernel.replace("_", " ")


class TriggerCompiler(Compiler):
    """Builds each source with its own trigger, EARLY where ``triggers`` doesn't name it."""

    def __init__(self, arch: str, cache: Path | None, triggers: Mapping[str, int]) -> None:
        super().__init__(arch, cache)
        self._triggers = triggers

    def build(self, sources: Sequence[str], defines: Mapping[str, int], libraries: Sequence[Path] = ()) -> bytes:
        trigger = self._triggers.get(sources[0], EARLY)
        return super().build(sources, {**defines, **({"BLINK_TRIGGER": trigger} if trigger else {})}, libraries)


class RingProducts(MatrixProducts):
    """Products of the skinny kernel's likeliest schedule, with rings of a given size; None: cuBLASLt's first choice."""

    def __init__(self, device: Device, skinny: SkinnyGemm | None, ring: int) -> None:
        super().__init__(device, skinny)
        self._own, self._ring = skinny, ring

    def launch(self, stream: Stream, shape: Shape, operands: Operands, way: str) -> None:
        if self._own is None or not way.startswith(SKINNY):
            super().launch(stream, shape, operands, way)
            return
        rows = int(way.removeprefix(SKINNY))
        schedule = replace(Schedule.of(rows, shape.weight_rows, self._own.multiprocessors), ring=self._ring)
        m, n, k, ending = shape
        if ending == "swiglu":
            self._own.swiglu(stream, *operands, m=m, n=n, k=k, schedule=schedule)
        else:
            self._own.matmul(stream, *operands, m=m, n=n, k=k, fp32_out=ending == "fp32", schedule=schedule)


@dataclass(frozen=True)
class Variant:
    """A way to run the step.

    Attributes:
        ring: bytes of a product's ring; 0 for cuBLASLt.
        overlapping: places.
        triggers: by source, of those that aren't EARLY.
    """

    name: str
    overlapping: tuple[str, ...] = PLACES
    ring: int = RING_BYTES
    triggers: tuple[tuple[str, int], ...] = ()


def triggered(name: str, sources: Sequence[str], trigger: int, ring: int = RING_BYTES) -> Variant:
    return Variant(name, PLACES, ring, tuple((source, trigger) for source in sources))


def without(*places: str) -> tuple[str, ...]:
    return tuple(place for place in PLACES if place not in places)


def variants() -> Iterator[Variant]:
    """The first is what the others are compared with."""
    every = (*SMALL, *PRODUCTS, "attention.cu")
    yield Variant("none", ())
    yield Variant("cuBLASLt, none", (), 0)
    yield Variant("all")
    yield Variant("all, cuBLASLt", PLACES, 0)
    yield Variant("half rings: none", (), HALF_RING)
    yield Variant("half rings: all", PLACES, HALF_RING)
    yield triggered("half rings: all, triggers after the wait", every, AFTER_WAIT, HALF_RING)
    yield triggered("half rings: all, triggers at the end", every, AT_END, HALF_RING)
    yield triggered("all, triggers after the wait", every, AFTER_WAIT)
    yield triggered("all, triggers at the end", every, AT_END)
    yield triggered("all, attention's trigger at the end", ("attention.cu",), AT_END)
    yield triggered("all, products' trigger at the end", PRODUCTS, AT_END)
    yield triggered("all, small kernels' trigger at the end", SMALL, AT_END)
    for place in OF_LAYER:
        yield Variant(f"all but {place}", without(place))
    for place in OF_LAYER:
        yield Variant(f"only {place}", (place,))
    for place in OF_LAYER:
        yield Variant(f"half rings: all but {place}", without(place), HALF_RING)
    for place, successor in zip(OF_LAYER, (*OF_LAYER[1:], OF_LAYER[0]), strict=True):
        yield Variant(f"only {place} and {successor}", (place, successor))
    yield Variant("only outside layers", OF_STEP)


class OverlapBench:
    """A random Llama-3-8B whose step runs in any variant."""

    def __init__(self, rows: int) -> None:
        self.model, self.stream = RandomModel("llama3-8b"), PlacedStream()
        self.device = self.model.device
        pages = -(-CONTEXT // self.model.geometry.page_size)
        self.pages, self.arrays = rows * pages, StepArrays(StepLimits(rows, rows, pages))
        self._executors: dict[tuple[tuple[str, int], ...], StepExecutor] = {}
        self._products: dict[tuple[int, tuple[tuple[str, int], ...]], RingProducts] = {}

    def executor(self, variant: Variant) -> StepExecutor:
        key = variant.triggers
        if key not in self._executors:
            self._executors[key] = self.model.executor(self.arrays, self.pages, self._compiler(variant))
        if (variant.ring, key) not in self._products:
            own = SkinnyGemm(self.device, self._compiler(variant)) if variant.ring else None
            self._products[variant.ring, key] = RingProducts(self.device, own, variant.ring)
        executor = self._executors[key]
        executor.products = self._products[variant.ring, key]
        return executor

    def _compiler(self, variant: Variant) -> Compiler:
        return TriggerCompiler(self.device.arch, default_cache(), dict(variant.triggers))

    def upload(self, batch: int) -> None:
        rng = np.random.default_rng()
        table = rng.permutation(self.pages).reshape(self.arrays.limits.rows, -1).astype(np.int32)
        self.arrays.upload(random_step(rng, table, self.model.config.vocabulary, [(CONTEXT - 1, 1)] * batch))

    def run(self, variant: Variant, batch: int) -> tuple[float, NDArray[np.float32]]:
        """Milliseconds of the step, and its logits."""
        executor = self.executor(variant)
        self.stream.places = variant.overlapping
        executor.activations.logits.fill(0xFF)
        seconds = replay_seconds(self.stream, lambda: executor.launch(self.stream, batch, batch), repeats=12)
        logits = executor.activations.logits.download(np.float32, (batch, self.model.config.vocabulary))
        return 1e3 * seconds, logits


def measure(bench: OverlapBench, batches: Sequence[int], deadline: float) -> dict[str, dict[str, float]]:
    """Milliseconds by batch and variant; says how each compares with the first as it goes."""
    found: dict[str, dict[str, float]] = {str(batch): {} for batch in batches}
    logits: dict[int, NDArray[np.float32]] = {}
    wrong = 0
    for batch in batches:
        bench.upload(batch)
        for variant in variants():
            if time.monotonic() > deadline:
                print("no time is left", flush=True)
                break
            print(f"batch {batch:3}  {variant.name:45}", end="", flush=True)
            took, now = bench.run(variant, batch)
            times = found[str(batch)]
            times[variant.name] = took
            # cuBLASLt's first choice may split k: other bits.
            same = variant.ring == 0 or np.array_equal(now, logits.setdefault(batch, now))
            wrong += not same or not np.isfinite(now).all()
            fault = "" if same else "  OTHER BITS"
            print(f"{took:8.3f} ms  {took - times['none']:+7.3f}{fault}", flush=True)
    if wrong:
        sys.exit(f"{wrong} variants have wrong logits")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--seconds", type=float, default=36.0, help="after the model is there")
    parser.add_argument("--json", type=Path, help="write results there too")
    arguments = parser.parse_args()
    bench = OverlapBench(max(arguments.batches))
    print(
        f"{bench.device.name}: a step of one token each over {CONTEXT}, and the difference from no overlap", flush=True
    )
    found = measure(bench, arguments.batches, time.monotonic() + arguments.seconds)
    write_json(arguments.json, "overlap", found)


if __name__ == "__main__":
    main()
