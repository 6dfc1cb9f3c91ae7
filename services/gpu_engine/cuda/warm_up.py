"""Before steps are captured: every kernel is loaded, and the best way to compute every matrix product chosen."""

from __future__ import annotations

from collections.abc import Sequence

from services.gpu_engine.cuda.choosing import choose
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Stream
from services.gpu_engine.cuda.graph_cache import Progress, Record
from services.gpu_engine.cuda.holds import Holds
from services.gpu_engine.cuda.products import MatrixProducts
from services.gpu_engine.cuda.step_clock import StepClock


def warm_up(
    compiler: Compiler,
    products: MatrixProducts,
    buckets: Sequence[int],
    record: Record,
    excerpt: Record,
    *,
    progress: Progress = lambda _done, _total: None,
) -> None:
    """Run a step of each bucket, and choose how to compute its products.

    Libraries load kernels on first use, which can't be captured.

    Args:
        record: launches a step of at most so many tokens; the step's counts are zero.
        excerpt: launches a few layers of it, by whose time is chosen.
    """
    holds = Holds(compiler)
    clock = StepClock(holds)
    try:
        for done, bucket in enumerate(buckets):
            with products.observing() as seen:
                record(clock.stream, bucket)
            clock.stream.synchronize()

            def few_layers(stream: Stream, bucket: int = bucket) -> None:
                excerpt(stream, bucket)

            choose(products, seen, few_layers, clock)
            progress(done + 1, len(buckets))
    finally:
        holds.close()
    products.keep()
