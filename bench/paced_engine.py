"""An engine that takes a GPU's time and computes nothing: ``python -m bench.paced_engine RING MARKS``.

Ring and scheduling core are the real ones; only the forward pass is a sleep. A step of decodes takes what one of
Llama-3-8B takes on an H200, a step with a prompt what a first token alone takes there. At the end MARKS gets, by
``key_of`` its prompt, when each request's first step began and when its first token was in the log.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import time
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.gpu_engine.core._core import Scheduler, SchedulerConfig
from services.ring.header import RingInfo
from services.ring.schema import EngineState, RingGeometry
from services.ring.shm import ShmRing
from tests.support.stand_in_engine import FINGERPRINT

VOCABULARY, CONTEXT = 49_152, 8_192
PAGE, PAGES, RUNNING, BATCHED = 16, 32_768, 512, 8_192
TOKEN = 300  # what every sample is: one character
LOOK = 50e-6  # seconds between two looks at an idle ring
_PR_SET_TIMERSLACK = 29


def key_of(prompt: bytes) -> str:
    """What engine, gateway and client know one request by: its text, or its ids as uint32."""
    return f"{zlib.crc32(prompt):08x}"


class PacedEngine:
    """Times are seconds."""

    def __init__(self, ring: ShmRing, decode: float, first: float) -> None:
        self._decode, self._first = decode, first
        config = SchedulerConfig(page_size=PAGE, page_count=PAGES, max_running=RUNNING, max_batched_tokens=BATCHED)
        self._scheduler = Scheduler(ring.region, config)
        self._scheduler.start(time.time_ns())
        self.marks: dict[str, tuple[float, float]] = {}  # by prompt: its first step's begin and end
        self.stopped = False

    def run(self) -> None:
        """Serve until ``stopped``."""
        self._scheduler.set_state(EngineState.READY)
        while not self.stopped:
            begin = time.monotonic()
            self._scheduler.poll(int(begin * 1e6))
            self._scheduler.heartbeat()
            if self._scheduler.idle or not self._scheduler.plan(int(begin * 1e6)):
                time.sleep(LOOK)
                continue
            step = self._scheduler.step
            samples = step.samples
            firsts = [key_of(prompt.tobytes()) for prompt in self._prompts_that_begin()]
            end = begin + (self._first if firsts else self._decode)
            time.sleep(max(0.0, end - time.monotonic()))
            self._scheduler.commit(int(end * 1e6), np.full(samples, TOKEN, np.int32), np.zeros(samples, np.float32))
            committed = time.monotonic()
            self.marks |= dict.fromkeys(firsts, (begin, committed))

    def _prompts_that_begin(self) -> list[npt.NDArray[np.uint32]]:
        step = self._scheduler.step
        begins = step.positions[step.row_start[:-1]] == 0
        rows = step.sampling[begins[step.sample_row]]
        starts, lengths = rows["history_offset"].tolist(), rows["prompt_tokens"].tolist()
        return [step.history[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ring", type=Path)
    parser.add_argument("marks", type=Path)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--decode-ms", type=float, default=4.2)
    parser.add_argument("--first-ms", type=float, default=5.0)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)  # sleeps end when they should
    geometry = RingGeometry(options.lanes, options.slots, arena_bytes=1 << 24, log_entries=1 << 16)
    info = RingInfo(geometry, fingerprint=FINGERPRINT, vocabulary_size=VOCABULARY, max_context_tokens=CONTEXT)
    with ShmRing.create(options.ring, info) as ring:
        engine = PacedEngine(ring, options.decode_ms / 1e3, options.first_ms / 1e3)

        def stop(*_: object) -> None:
            engine.stopped = True

        signal.signal(signal.SIGTERM, stop)
        print("READY", flush=True)
        engine.run()
        options.marks.write_text(json.dumps(engine.marks))


if __name__ == "__main__":
    main()
