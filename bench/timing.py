"""Device time of captured launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from services.gpu_engine.cuda.driver import Stream, Timer


def replay_seconds(stream: Stream, launch: Callable[[], None], repeats: int = 20) -> float:
    """Median time of one replay of what ``launch`` launches on the stream, after a first run and three replays."""
    launch()
    stream.synchronize()
    with stream.capture() as graphs:
        launch()
    timer, times = Timer(stream), []
    for _ in range(repeats + 3):
        timer.start()
        graphs[0].launch(stream)
        times.append(timer.stop())
    return statistics.median(times[3:])
