"""How to compute each matrix product of a step: by what makes the step fastest.

What is fastest launched over and over need not be so between the other kernels of a step (docs/decisions/
0026-choices-in-context.md). So launches of a product alone only rule out what is far behind. What is left is compared
by the time of an excerpt of the step, a graph of a few layers and the head: product by product, those first that take
most of the time, each keeping its winner while the next ones are compared.

That is done in full for a few buckets of tokens, the anchors. A bucket between two of them knows their winners. Those
that are as fast alone as any other way there are compared in the step, if they differ; if there are none, the fastest
alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from services.gpu_engine.cuda.cublas_lt import Operands, Shape
from services.gpu_engine.cuda.driver import Stream
from services.gpu_engine.cuda.products import MatrixProducts, kernel_of
from services.gpu_engine.cuda.step_clock import StepClock
from services.gpu_engine.models.family import Layer

EXCERPT_LAYERS = 3
"""With the head, more weights than the L2 cache holds, so each comes from memory as in the whole step."""
FAR = 1.25  # times the fastest alone: not compared in the step
MOST_NEAR = 6
NEAR = 1.01  # times the fastest at the first look in the step: what is looked at again
LOOKS = 5
FEW_LOOKS = 3  # between anchors
TIE = 1.002  # what a way must gain to replace the one that is there
CLEAR = 1.03  # times the fastest alone: an anchor's winner as slow is compared with others again
MOST_UNFAMILIAR = 3
FEWEST_TOKENS = 8  # fewer cost what these do

Excerpt = Callable[[Stream], None]


def excerpt_of(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The embedding, the first EXCERPT_LAYERS pairs of attention and feed-forward, and the head."""
    return (*layers[:-1][: 1 + 2 * EXCERPT_LAYERS], layers[-1])


def anchors_of(buckets: Iterable[int]) -> list[int]:
    """The largest of the buckets up to FEWEST_TOKENS, of those up to twice as many, and so on; rising."""
    octaves = {(max(bucket, FEWEST_TOKENS) - 1).bit_length(): bucket for bucket in sorted(buckets)}
    return list(octaves.values())


def choose(
    products: MatrixProducts,
    seen: Mapping[Shape, Sequence[Operands]],
    excerpt: Excerpt,
    clock: StepClock,
    chosen: Mapping[Shape, str],
) -> None:
    """Settle how to compute the products that ``observing`` has seen in a step.

    Args:
        excerpt: launches the few layers; the step's counts are zero, so kernels other than products only begin and end.
        chosen: how products are computed at the anchors; what is not there for any number of tokens is chosen in full.

    Raises:
        DriverError: there is no way to compute one of them in the engine's order.
    """
    if not seen:
        return
    with clock.phases.of("order"):
        ways = {shape: products.in_order(clock.stream, shape, operands[0]) for shape, operands in seen.items()}
    with clock.phases.of("alone"):
        alone = clock.alone(products, seen, ways)
    familiar = {shape: neighbours(shape, chosen) for shape in seen}
    compared = {
        shape: between(alone[shape], known) if known else likely(alone[shape]) for shape, known in familiar.items()
    }
    for shape, found in compared.items():
        products.ways[shape] = found[0]
    with clock.phases.of("in the step"):
        with products.observing() as inside:
            excerpt(clock.stream)
        for shape in by_share(alone, seen):
            if shape in inside:
                looks = FEW_LOOKS if familiar[shape] else LOOKS
                way = fastest_in_step(products, shape, compared[shape], excerpt, clock, looks=looks)
            else:  # of layers that are not like the first ones, such as those that a checkpoint leaves in bf16
                way = min(alone[shape], key=alone[shape].__getitem__)
            products.settle(shape, way)


def by_share(alone: Mapping[Shape, Mapping[str, float]], seen: Mapping[Shape, Collection[Operands]]) -> list[Shape]:
    """The products that take most of a step's time first."""
    return sorted(alone, key=lambda shape: -min(alone[shape].values()) * len(seen[shape]))


def likely(alone: Mapping[str, float]) -> list[str]:
    """Of ways with their seconds alone: the first of each kernel's, and the fastest of those not far behind."""
    firsts: dict[str, str] = {}
    for way in alone:
        firsts.setdefault(kernel_of(way), way)
    limit = FAR * min(alone.values())
    near = sorted((way for way in alone if alone[way] <= limit), key=alone.__getitem__)
    return list(dict.fromkeys([*firsts.values(), *near[:MOST_NEAR]]))


def neighbours(shape: Shape, chosen: Mapping[Shape, str]) -> list[str]:
    """How the same product is computed for the next larger number of tokens in ``chosen``, and for the next smaller."""
    same = {other.m: way for other, way in chosen.items() if other._replace(m=shape.m) == shape}
    above = min((m for m in same if m > shape.m), default=None)
    below = max((m for m in same if m < shape.m), default=None)
    return list(dict.fromkeys(same[m] for m in (above, below) if m is not None))


def between(alone: Mapping[str, float], familiar: Collection[str]) -> list[str]:
    """Of ways with their seconds alone: the familiar ones unless clearly slower than others, else the fastest.

    A familiar way may be none of these: the library does not suggest the same for each number of tokens.
    """
    fastest_first = sorted(alone, key=alone.__getitem__)
    best = alone[fastest_first[0]]
    near = [way for way in familiar if alone.get(way, math.inf) <= CLEAR * best]
    return near or [way for way in fastest_first[:MOST_UNFAMILIAR] if alone[way] <= FAR * best]


def fastest_in_step(
    products: MatrixProducts, shape: Shape, ways: Sequence[str], excerpt: Excerpt, clock: StepClock, *, looks: int
) -> str:
    """That of ``ways`` with which the excerpt takes the least time, all other products staying as they are."""
    if len(ways) == 1:
        return ways[0]
    captured = {}
    for way in ways:
        products.ways[shape] = way
        captured[way] = clock.capture(excerpt)
    replays = max(graph.replays for graph in captured.values())  # what begins and ends a sample counts alike
    with clock.beside_the_loop():
        return fastest(ways, lambda way: clock.replay(replace(captured[way], replays=replays)), looks)


def fastest(ways: Sequence[str], seconds: Callable[[str], float], looks: int = LOOKS) -> str:
    """One look at each, more in turns at those near the fastest. The first stays unless a median is clearly less."""
    samples = {way: [seconds(way)] for way in ways}
    limit = NEAR * min(times[0] for times in samples.values())
    near = {way: times for way, times in samples.items() if way == ways[0] or times[0] <= limit}
    if len(near) > 1:
        for _ in range(looks - 1):
            for way, times in near.items():
                times.append(seconds(way))
    medians = {way: statistics.median(times) for way, times in near.items()}
    best = min(medians, key=medians.__getitem__)
    return best if TIE * medians[best] < medians[ways[0]] else ways[0]
