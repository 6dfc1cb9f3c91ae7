"""Before steps are captured: every kernel is loaded, and the best way to compute every matrix product chosen."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from services.common.logging import get_logger
from services.gpu_engine.cuda.choosing import anchors_of, choose
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.cublas_lt import Shape
from services.gpu_engine.cuda.driver import Stream
from services.gpu_engine.cuda.graph_cache import Progress, Record
from services.gpu_engine.cuda.holds import Holds
from services.gpu_engine.cuda.products import MatrixProducts
from services.gpu_engine.cuda.step_clock import StepClock

log = get_logger(component="cuda_engine")


def warm_up(
    compiler: Compiler,
    products: MatrixProducts,
    buckets: Sequence[int],
    record: Record,
    excerpt: Record,
    *,
    progress: Progress = lambda _done, _total: None,
    anchors: Collection[int] | None = None,
) -> None:
    """Run a step of each bucket, and choose how to compute its products.

    Libraries load kernels on first use, which can't be captured.

    Args:
        buckets: rising token counts.
        record: launches a step of at most so many tokens; the step's counts are zero.
        excerpt: launches a few layers of it, by whose time is chosen.
        anchors: those of ``buckets`` whose products are chosen in full; by default ``anchors_of`` them.
    """
    first = anchors_of(buckets) if anchors is None else anchors
    in_turn = sorted(buckets, key=lambda bucket: (bucket not in first, bucket))
    chosen: dict[Shape, str] = {}
    holds = Holds(compiler)
    clock = StepClock(holds)
    try:
        for done, bucket in enumerate(in_turn):
            with clock.phases.of("steps"):
                with products.observing() as seen:
                    record(clock.stream, bucket)
                clock.stream.synchronize()

            def few_layers(stream: Stream, bucket: int = bucket) -> None:
                excerpt(stream, bucket)

            choose(products, seen, few_layers, clock, {} if bucket in first else chosen)
            if bucket in first:
                chosen = dict(products.ways)
            progress(done + 1, len(in_turn))
    finally:
        holds.close()
    products.keep()
    log.info("products_chosen", buckets=len(buckets), anchors=len(first), seconds=clock.phases.seconds())
