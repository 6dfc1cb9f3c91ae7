"""How to compute each matrix product of a step: by what makes the step fastest.

What is fastest launched over and over need not be so between the other kernels of a step (docs/decisions/
0026-choices-in-context.md). So launches of a product alone only rule out what is far behind. What is left is compared
by the time of an excerpt of the step, a graph of a few layers and the head: product by product, those first that take
most of the time, each keeping its winner while the next ones are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

from services.gpu_engine.cuda.cublas_lt import Operands, Shape
from services.gpu_engine.cuda.driver import Stream
from services.gpu_engine.cuda.products import SKINNY, MatrixProducts
from services.gpu_engine.cuda.step_clock import StepClock
from services.gpu_engine.models.family import Layer

EXCERPT_LAYERS = 3
"""With the head, more weights than the L2 cache holds, so each comes from memory as in the whole step."""
FAR = 1.25  # times the fastest alone: not compared in the step
MOST_NEAR = 6
NEAR = 1.01  # times the fastest at the first look in the step: what is looked at again
LOOKS = 5
TIE = 1.002  # what a way must gain to replace the one that is there

Excerpt = Callable[[Stream], None]


def excerpt_of(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The embedding, the first EXCERPT_LAYERS pairs of attention and feed-forward, and the head."""
    return (*layers[:-1][: 1 + 2 * EXCERPT_LAYERS], layers[-1])


def choose(
    products: MatrixProducts, seen: Mapping[Shape, Sequence[Operands]], excerpt: Excerpt, clock: StepClock
) -> None:
    """Settle how to compute the products that ``observing`` has seen in a step.

    Args:
        excerpt: launches the few layers; the step's counts are zero, so kernels other than products only begin and end.

    Raises:
        DriverError: there is no way to compute one of them in the engine's order.
    """
    if not seen:
        return
    ways = {shape: products.in_order(clock.stream, shape, operands[0]) for shape, operands in seen.items()}
    for shape, found in ways.items():
        products.ways[shape] = found[0]
    alone = clock.alone(products, seen, ways)
    with products.observing() as inside:
        excerpt(clock.stream)
    for shape in by_share(alone, seen):
        if shape in inside:
            way = fastest_in_step(products, shape, likely(alone[shape]), excerpt, clock)
        else:  # of layers that are not like the first ones, such as those that a checkpoint leaves in bf16
            way = min(alone[shape], key=alone[shape].__getitem__)
        products.settle(shape, way)


def by_share(alone: Mapping[Shape, Mapping[str, float]], seen: Mapping[Shape, Collection[Operands]]) -> list[Shape]:
    """The products that take most of a step's time first."""
    return sorted(alone, key=lambda shape: -min(alone[shape].values()) * len(seen[shape]))


def likely(alone: Mapping[str, float]) -> list[str]:
    """Of ways with their seconds alone: the first of each kernel's, and the fastest of those not far behind."""
    firsts: dict[bool, str] = {}
    for way in alone:
        firsts.setdefault(way.startswith(SKINNY), way)
    limit = FAR * min(alone.values())
    near = sorted((way for way in alone if alone[way] <= limit), key=alone.__getitem__)
    return list(dict.fromkeys([*firsts.values(), *near[:MOST_NEAR]]))


def fastest_in_step(
    products: MatrixProducts, shape: Shape, ways: Sequence[str], excerpt: Excerpt, clock: StepClock
) -> str:
    """That of ``ways`` with which the excerpt takes the least time, all other products staying as they are."""
    if len(ways) == 1:
        return ways[0]
    graphs = {}
    for way in ways:
        products.ways[shape] = way
        graphs[way] = clock.capture(excerpt)
    with clock.beside_the_loop():
        return fastest(ways, lambda way: clock.replay(graphs[way]))


def fastest(ways: Sequence[str], seconds: Callable[[str], float]) -> str:
    """One look at each, more in turns at those near the fastest. The first stays unless a median is clearly less."""
    looks = {way: [seconds(way)] for way in ways}
    limit = NEAR * min(times[0] for times in looks.values())
    near = {way: times for way, times in looks.items() if way == ways[0] or times[0] <= limit}
    if len(near) > 1:
        for _ in range(LOOKS - 1):
            for way, times in near.items():
                times.append(seconds(way))
    medians = {way: statistics.median(times) for way, times in near.items()}
    best = min(medians, key=medians.__getitem__)
    return best if TIE * medians[best] < medians[ways[0]] else ways[0]
