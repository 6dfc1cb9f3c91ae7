"""Times products, and steps in which they run, as they run while serving: beside the control loop, all queued."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from services.gpu_engine.cuda.cublas_lt import Operands, Shape
from services.gpu_engine.cuda.driver import Buffer, Graph, Stream, Timer
from services.gpu_engine.cuda.holds import Holds
from services.gpu_engine.cuda.phases import Phases
from services.gpu_engine.cuda.products import MatrixProducts

_ALONE_SECONDS, _REPLAY_SECONDS = 0.5e-3, 2e-3  # that a sample should take
_ALONE_LAUNCHES = range(2, 13)
_MOST_REPLAYS = 8
_BYTES_PER_SECOND, _OPERATIONS_PER_SECOND = 4e12, 7e14  # an H200's, to guess how often a sample should launch


@dataclass(frozen=True)
class Captured:
    """Launches to be timed: a sample is so many replays of the graph."""

    graph: Graph
    replays: int


class StepClock:
    """Measures on a stream of its own.

    Attributes:
        phases: what the measuring itself takes.
    """

    def __init__(self, holds: Holds) -> None:
        self.stream = Stream()
        self.phases = Phases()
        self._timer = Timer(self.stream)
        self._holds = holds

    def alone(
        self, products: MatrixProducts, seen: Mapping[Shape, Sequence[Operands]], ways: Mapping[Shape, Sequence[str]]
    ) -> dict[Shape, dict[str, float]]:
        """Seconds of one launch of each way, the mean over launches that follow each other with all layers' weights."""
        out = Buffer(max(shape.out_bytes for shape in seen), "products that are being compared")
        times: dict[Shape, dict[str, float]] = {}
        with self.beside_the_loop():
            for shape, operands in seen.items():
                turns = [operand._replace(out=out.pointer) for operand in operands]
                times[shape] = {way: self._alone(products, shape, turns, way) for way in ways[shape]}
        return times

    def capture(self, launch: Callable[[Stream], None]) -> Captured:
        """What ``launch`` launches, having run: nothing is left to be uploaded."""
        with self.stream.capture() as graphs:
            launch(self.stream)
        self._timer.start()
        graphs[0].launch(self.stream)
        seconds = self._timer.stop()
        return Captured(graphs[0], max(1, min(int(_REPLAY_SECONDS / seconds), _MOST_REPLAYS)))

    def replay(self, captured: Captured) -> float:
        """Seconds of one replay, the mean of a sample."""
        with self._holds.queued_whole(self.stream):
            self._timer.start()
            for _ in range(captured.replays):
                captured.graph.launch(self.stream)
            self._timer.end()
        return self._timer.seconds() / captured.replays

    @contextmanager
    def beside_the_loop(self) -> Iterator[None]:
        """The control loop's multiprocessor is occupied. What is loaded or allocated inside would wait; see Holds."""
        with self._holds.occupied_multiprocessor():
            yield

    def _alone(self, products: MatrixProducts, shape: Shape, turns: Sequence[Operands], way: str) -> float:
        guess = max(shape.bytes / _BYTES_PER_SECOND, shape.operations / _OPERATIONS_PER_SECOND)
        launches = min(max(int(_ALONE_SECONDS / guess), _ALONE_LAUNCHES[0]), _ALONE_LAUNCHES[-1])
        with self._holds.queued_whole(self.stream):
            self._timer.start()
            for turn in range(launches):
                products.launch(self.stream, shape, turns[turn % len(turns)], way)
            self._timer.end()
        return self._timer.seconds() / launches
