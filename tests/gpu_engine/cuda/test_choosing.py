"""How ways to compute products are chosen, with given times of launches and of graphs in place of the GPU's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra blink[cuda]")

from services.gpu_engine.cuda import products as products_module
from services.gpu_engine.cuda import warm_up as warm_up_module
from services.gpu_engine.cuda.choosing import (
    CLEAR,
    FAR,
    FEW_LOOKS,
    LOOKS,
    MOST_NEAR,
    MOST_UNFAMILIAR,
    NEAR,
    TIE,
    anchors_of,
    between,
    choose,
    excerpt_of,
    fastest,
    likely,
    neighbours,
)
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.cublas_lt import Operands, Shape
from services.gpu_engine.cuda.driver import Device, Stream
from services.gpu_engine.cuda.graph_cache import default_buckets
from services.gpu_engine.cuda.holds import Holds
from services.gpu_engine.cuda.phases import Phases
from services.gpu_engine.cuda.products import MatrixProducts
from services.gpu_engine.cuda.step_clock import Captured, StepClock
from services.gpu_engine.models.family import Attention, Embedding, FeedForward, Head
from services.gpu_engine.models.llama import llama
from tests.gpu.steps import config

WAYS = ["first", "second", "third"]
M = 200
SMALL, LARGE, LATE = (Shape(M, n, 512, "bf16") for n in (1024, 4096, 2048))
NOTHING: Any = None  # in place of a stream or a device's object


class Times:
    """Each look takes the way's next time, the last one again and again."""

    def __init__(self, **ways: list[float]) -> None:
        self.ways = ways
        self.looks: Counter[str] = Counter()

    def __call__(self, way: str) -> float:
        self.looks[way] += 1
        times = self.ways[way]
        return times[min(self.looks[way], len(times)) - 1]


def test_the_fastest_wins_wherever_it_stands() -> None:
    for ways in (["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"]):
        assert fastest(ways, Times(a=[3.0], b=[1.0], c=[2.0])) == "b"


def test_one_lucky_look_does_not_win() -> None:
    assert fastest(["lucky", "steady"], Times(lucky=[1.0, 1.3], steady=[1.005])) == "steady"


def test_what_is_far_behind_is_looked_at_once() -> None:
    times = Times(fast=[1.0], slow=[2.0 * NEAR], near=[1.005])
    assert fastest(["fast", "slow", "near"], times) == "fast"
    assert times.looks == {"fast": LOOKS, "slow": 1, "near": LOOKS}


def test_what_gains_less_than_noise_does_not_replace_the_first() -> None:
    gain = 1.0 / TIE
    assert fastest(["first", "other"], Times(first=[1.0], other=[gain * 1.0001])) == "first"
    assert fastest(["first", "other"], Times(first=[1.0], other=[gain * 0.9999])) == "other"


def test_compared_in_the_step_are_the_first_of_each_kernel_and_the_fastest_alone() -> None:
    alone = {f"skinny {rows}": 1.0 + rows / 100 for rows in range(MOST_NEAR + 2)} | {"library": 9.0, "library's": 9.0}
    alone["skinny 0"] = 1.01 * FAR
    expected = ["skinny 0", "library", *(f"skinny {rows}" for rows in range(1, MOST_NEAR + 1))]
    assert likely(alone) == expected
    assert likely({"only": 1.0}) == ["only"]
    assert likely({"wide 128x224": 2.0, "wide 64x128": 1.9, "library": 1.0}) == ["wide 128x224", "library"]
    assert likely({"a": 1.0, "b": 0.99 * FAR, "c": 1.01 * FAR}) == ["a", "b"]


def test_the_largest_bucket_of_each_octave_is_an_anchor() -> None:
    assert anchors_of(default_buckets(2048)) == [8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    assert anchors_of(default_buckets(3000))[-2:] == [2048, 3000]
    assert anchors_of([1, 7, 33, 60, 65, 2000]) == [7, 60, 65, 2000]
    assert anchors_of([96, 33, 60]) == [60, 96]
    assert anchors_of([1]) == [1]
    assert anchors_of([]) == []


def test_every_bucket_has_an_anchor_that_is_at_most_twice_as_large() -> None:
    for most in (1, 7, 8, 9, 100, 256, 1000, 2048, 8192, 16384):
        buckets = default_buckets(most)
        anchors = anchors_of(buckets)
        assert anchors[-1] == most
        for bucket in buckets:
            assert any(bucket <= anchor < 2 * max(bucket, 8) for anchor in anchors)


def test_neighbours_are_the_nearest_anchors_of_the_same_product() -> None:
    chosen = {
        SMALL._replace(m=64): "too far below",
        SMALL._replace(m=128): "below",
        SMALL._replace(m=256): "above",
        SMALL._replace(m=512): "too far above",
        LARGE._replace(m=192): "of another product",
        SMALL._replace(m=192, ending="fp32"): "of another ending",
    }
    assert neighbours(SMALL, chosen) == ["above", "below"]
    assert neighbours(SMALL._replace(m=8), chosen) == ["too far below"]
    assert neighbours(SMALL._replace(m=2048), chosen) == ["too far above"]
    assert neighbours(LATE, chosen) == neighbours(SMALL, {}) == []
    assert neighbours(SMALL, {SMALL._replace(m=m): "same" for m in (128, 256)}) == ["same"]


def test_a_familiar_way_is_taken_unless_another_is_clearly_faster_alone() -> None:
    alone = {"known": 1.0, "other": 1.0001 / CLEAR, "slow": 2.0}
    assert between(alone, ["known"]) == ["known"]
    assert between(alone | {"other": 0.9999 / CLEAR}, ["known"]) == ["other", "known"]


def test_familiar_ways_that_are_equally_fast_are_compared_and_others_not() -> None:
    alone = {"a": 1.0, "above": 1.02, "below": 1.01, "c": 1.001}
    assert between(alone, ["above", "below"]) == ["above", "below"]
    assert between(alone | {"above": 1.01 * CLEAR}, ["above", "below"]) == ["below"]


def test_where_no_familiar_way_is_good_the_fastest_alone_are_compared() -> None:
    alone = {f"{rank}": 1.0 + rank / 1000 for rank in range(MOST_UNFAMILIAR + 2)}
    assert between(alone, ["suggested for other numbers of tokens alone"]) == list(alone)[:MOST_UNFAMILIAR]
    assert between({"a": 1.0, "b": 1.01 * FAR}, ["gone"]) == ["a"]


def test_an_excerpt_has_the_first_layers_and_the_head() -> None:
    layers = llama(config(layers=6))
    kinds = [type(layer) for layer in excerpt_of(layers)]
    assert kinds == [Embedding, *[Attention, FeedForward] * 3, Head]
    assert excerpt_of(layers)[-1] is layers[-1]
    short = llama(config(layers=2))
    assert excerpt_of(short) == short


class Library:
    """In place of cuBLASLt: three ways for each product."""

    version = "none"

    def __init__(self, _device: Device) -> None:
        self.launched: list[Shape] = []

    def candidates(self, _shape: Shape, *, split: bool) -> list[str]:
        assert not split
        return list(WAYS)

    def launch(self, _stream: Stream, shape: Shape, _operands: Operands, _way: str) -> None:
        self.launched.append(shape)


class Products(MatrixProducts):
    """All ways keep the order."""

    def in_order(self, _stream: Stream, shape: Shape, _operands: Operands) -> list[str]:
        return self.candidates(shape)

    def run(self, *shapes: Shape) -> None:
        for m, n, k, _ in shapes:
            self.matmul(NOTHING, 0, 0, 0, m=m, n=n, k=k)


class IdleStream:
    def synchronize(self) -> None: ...


IDLE: Any = IdleStream()


class Clock(StepClock):
    """A captured graph takes what ``step`` says of the ways that were in use as it was captured."""

    def __init__(
        self, products: Products, alone: Mapping[Shape, dict[str, float]], step: Callable[[dict[Shape, str]], float]
    ) -> None:
        self.stream = IDLE
        self.phases = Phases()
        self.replays: Counter[int] = Counter()
        self.captured: list[dict[Shape, str]] = []
        self._products, self._alone_times, self._step = products, alone, step

    def alone(
        self, _products: MatrixProducts, seen: Mapping[Shape, Sequence[Operands]], _ways: Mapping[Shape, Sequence[str]]
    ) -> dict[Shape, dict[str, float]]:
        return {shape: self._alone_times[shape] for shape in seen}

    def capture(self, launch: Callable[[Stream], None]) -> Captured:
        launch(self.stream)
        self.captured.append(dict(self._products.ways))
        graph: Any = len(self.captured) - 1
        return Captured(graph, 1)

    def replay(self, captured: Captured) -> float:
        number: Any = captured.graph
        self.replays[number] += 1
        return self._step(self.captured[number])

    @contextmanager
    def beside_the_loop(self) -> Iterator[None]:
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(products_module, "CublasLt", Library)

    class Named:
        name = "none"

    stand_in: Any = Named()
    named: Device = stand_in
    return named


def alone_of(*shapes: Shape) -> dict[Shape, dict[str, float]]:
    """Alone the last way is the fastest, and none is far behind; larger products take longer."""
    return {shape: dict(zip(WAYS, (1.1 * shape.n, 1.05 * shape.n, 1.0 * shape.n), strict=True)) for shape in shapes}


def observe(products: Products, *shapes: Shape) -> dict[Shape, list[Operands]]:
    with products.observing() as seen:
        products.run(*shapes)
    return seen


def test_what_is_fastest_in_the_step_is_chosen_and_not_what_is_fastest_alone(device: Device) -> None:
    products = Products(device, None)
    cost = {"first": 10.0, "second": 9.0, "third": 11.0}
    clock = Clock(products, alone_of(SMALL, LARGE), lambda ways: sum(cost[way] for way in ways.values()))
    choose(products, observe(products, SMALL, LARGE), lambda _: products.run(SMALL, LARGE), clock, {})
    assert products.ways == {SMALL: "second", LARGE: "second"}


def test_the_largest_product_is_chosen_first_and_its_choice_is_there_for_the_next(device: Device) -> None:
    """The two disturb each other unless computed by the same way: from ``first`` on, the larger one decides."""
    products = Products(device, None)

    def step(ways: dict[Shape, str]) -> float:
        own = {"first": 10.0, "second": 9.0, "third": 8.0}
        return own[ways[LARGE]] + 3.0 * (ways[SMALL] != ways[LARGE]) * (ways[LARGE] != "second")

    clock = Clock(products, alone_of(SMALL, LARGE), step)
    choose(products, observe(products, SMALL, LARGE), lambda _: products.run(SMALL, LARGE), clock, {})
    large, small = clock.captured[: len(WAYS)], clock.captured[len(WAYS) :]
    assert [ways[LARGE] for ways in large] == ["first", "third", "second"]
    assert {ways[SMALL] for ways in large} == {"first"}
    assert {ways[LARGE] for ways in small} == {"second"}
    assert products.ways == {SMALL: "first", LARGE: "second"}


def test_a_product_that_the_excerpt_lacks_is_chosen_alone(device: Device) -> None:
    products = Products(device, None)
    clock = Clock(products, alone_of(LARGE, LATE), lambda _: 1.0)
    choose(products, observe(products, LARGE, LATE), lambda _: products.run(LARGE), clock, {})
    assert products.ways == {LARGE: "first", LATE: "third"}


def chosen_as(shape: Shape, below: str, above: str) -> dict[Shape, str]:
    return {shape._replace(m=128): below, shape._replace(m=256): above}


def test_where_neighbours_agree_nothing_is_captured(device: Device) -> None:
    products = Products(device, None)
    clock = Clock(products, {LARGE: dict(zip(WAYS, (1.0, 1.02, 1.0), strict=True))}, lambda _: 1.0)
    chosen = chosen_as(LARGE, "second", "second")
    choose(products, observe(products, LARGE), lambda _: products.run(LARGE), clock, chosen)
    assert products.ways == {LARGE: "second"}
    assert not clock.captured


def test_where_neighbours_differ_they_alone_are_compared_in_the_step(device: Device) -> None:
    products = Products(device, None)
    clock = Clock(
        products,
        {LARGE: dict(zip(WAYS, (1.0, 1.02, 1.0), strict=True))},
        lambda ways: {"first": 0.5, "second": 0.99, "third": 1.0}[ways[LARGE]],
    )
    chosen = chosen_as(LARGE, "second", "third")
    choose(products, observe(products, LARGE), lambda _: products.run(LARGE), clock, chosen)
    assert [ways[LARGE] for ways in clock.captured] == ["third", "second"]
    assert products.ways == {LARGE: "second"}
    assert set(clock.replays.values()) == {FEW_LOOKS}


@pytest.mark.parametrize("known", ["gone", "first"])
def test_a_neighbours_way_that_is_not_there_or_slow_for_these_tokens_gives_way(device: Device, known: str) -> None:
    products = Products(device, None)
    clock = Clock(
        products,
        {LARGE: dict(zip(WAYS, (1.01 * FAR, 1.0, 1.01), strict=True))},
        lambda ways: {"second": 1.0, "third": 0.9}[ways[LARGE]],
    )
    chosen = chosen_as(LARGE, known, known)
    choose(products, observe(products, LARGE), lambda _: products.run(LARGE), clock, chosen)
    assert products.ways == {LARGE: "third"}


def test_a_product_that_no_anchor_has_is_chosen_in_full(device: Device) -> None:
    products = Products(device, None)
    clock = Clock(products, alone_of(SMALL, LARGE), lambda _: 1.0)
    chosen = chosen_as(LARGE, "third", "third")
    choose(products, observe(products, SMALL, LARGE), lambda _: products.run(SMALL, LARGE), clock, chosen)
    assert products.ways == {SMALL: "first", LARGE: "third"}
    assert {ways[SMALL] for ways in clock.captured} == set(WAYS)
    assert {ways[LARGE] for ways in clock.captured} == {"third"}


def test_anchors_come_first_and_the_others_know_them(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second way is the best of anchors, the third everywhere else, were it looked at."""
    products, buckets = Products(device, None), [72, 128, 144, 256, 320]
    shapes = [LARGE._replace(m=bucket) for bucket in buckets]
    alone = {shape: dict.fromkeys(WAYS, 1.0) for shape in shapes}
    running: list[int] = []

    def step(ways: dict[Shape, str]) -> float:
        best = "second" if running[-1] in (128, 256, 320) else "third"
        return 1.0 - 0.1 * (ways[LARGE._replace(m=running[-1])] == best)

    class Hold:
        def __init__(self, _compiler: Compiler) -> None: ...
        def close(self) -> None: ...

    def clock(_holds: Holds) -> Clock:
        return Clock(products, alone, step)

    monkeypatch.setattr(warm_up_module, "Holds", Hold)
    monkeypatch.setattr(warm_up_module, "StepClock", clock)

    def record(_stream: Stream, bucket: int) -> None:
        running.append(bucket)
        products.run(LARGE._replace(m=bucket))

    done: list[tuple[int, int]] = []
    warm_up_module.warm_up(
        NOTHING, products, buckets, record, record, progress=lambda count, total: done.append((count, total))
    )
    assert list(dict.fromkeys(running)) == [128, 256, 320, 72, 144]
    assert set(products.ways.values()) == {"second"}
    assert done == [(count, len(buckets)) for count in range(1, len(buckets) + 1)]


def test_what_is_kept_is_taken_at_the_next_start_and_not_compared(device: Device, tmp_path: Path) -> None:
    def start(*shapes: Shape) -> tuple[Products, Clock]:
        products = Products(device, None, tmp_path)
        clock = Clock(products, alone_of(*shapes), lambda ways: {"second": 1.0}.get(ways[LARGE], 2.0))
        choose(products, observe(products, *shapes), lambda _: products.run(*shapes), clock, {})
        products.keep()
        return products, clock

    start(LARGE)
    products, clock = start(LARGE)
    assert products.ways == {LARGE: "second"}
    assert not clock.captured
    products, clock = start(LARGE, SMALL)
    assert products.ways == {LARGE: "second", SMALL: "first"}
    assert len(clock.captured) == len(WAYS)


def test_choices_of_another_kind_of_choosing_are_not_taken(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Products(device, None, tmp_path)
    before.settle(LARGE, "third")
    before.keep()
    monkeypatch.setattr(products_module, "CHOSEN_BY", "something better")
    assert LARGE in observe(Products(device, None, tmp_path), LARGE)
