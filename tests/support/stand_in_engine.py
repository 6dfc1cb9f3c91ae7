"""A stand-in for the engine: speaks the ring protocol like one, with scripted tokens instead of a model.

As a thread over any formatted region::

    with StandInEngine(region, Behaviour(tokens_per_second=50)).running() as engine: ...

or as a process that owns a shared-memory ring and prints READY: ``python -m tests.support.stand_in_engine PATH``.
"""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from services.ring import _atomics, dtypes, schema
from services.ring.header import RingInfo, read_ring_info
from services.ring.memory import MemoryTransport, Region
from services.ring.schema import Command, EngineState, RingGeometry
from services.ring.shm import ShmRing
from tests.support.stand_in_lane import Behaviour, StandInLane, echo

__all__ = ["Behaviour", "StandInEngine", "echo"]

FINGERPRINT = bytes(range(32))


class StandInEngine:
    """Serves every lane of the ring in ``region``. ``state`` may be set from outside, for example to FAILED."""

    def __init__(self, region: Region, behaviour: Behaviour | None = None, *, epoch: int | None = None) -> None:
        self.geometry = read_ring_info(MemoryTransport(region)).geometry
        self.behaviour = behaviour or Behaviour()
        self.state = EngineState.READY
        self.epoch = epoch or time.time_ns()
        self.lanes = [StandInLane(region, self.geometry, lane, self.behaviour) for lane in range(self.geometry.lanes)]
        self._region = region
        self._heartbeat = self._steps = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        offset = schema.header_offset(schema.ENGINE_COUNTERS)
        self._counters = region[offset : offset + schema.ENGINE_COUNTERS.size].view(dtypes.ENGINE_COUNTERS)
        self._store_status("epoch", self.epoch)
        self._store_status("state", EngineState.BOOTING)

    @property
    def steps(self) -> int:
        """Rounds in which something happened."""
        return self._steps

    def step(self) -> bool:
        """One round over all lanes; whether anything happened."""
        if self.behaviour.heartbeat_frozen:
            return False
        command = Command(_atomics.load_acquire(self._region, schema.header_offset(schema.BOOTSTRAP_CONTROL)))
        if command is not Command.RUN and self.state is EngineState.READY:
            self.state = EngineState.DRAINING
        busy = False
        for lane in self.lanes:
            busy |= lane.poll(self.state, command)
        self._steps += busy
        self._heartbeat += 1
        if busy:
            self._refresh_counters()
        self._store_status("steps", self._steps)
        self._store_status("state", self.state)
        self._store_status("heartbeat", self._heartbeat)
        if command is Command.STOP:
            self._stopped.set()
        return busy

    def run(self) -> None:
        """Serve until ``die`` or a STOP command."""
        while not self._stopped.is_set():
            if not self.step() and self.behaviour.idle_sleep:
                self._stopped.wait(self.behaviour.idle_sleep)

    def start(self) -> None:
        """Serve in a thread, also one that died: it goes on where it stood."""
        self._stopped.clear()
        self._thread = threading.Thread(target=self.run, name="stand-in-engine", daemon=True)
        self._thread.start()

    def die(self) -> None:
        """Stop at once, as a killed engine: nothing is said, open requests stay open, the heartbeat stands still."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def running(self) -> Iterator[StandInEngine]:
        """Serve in a thread for the duration of a with block."""
        self.start()
        try:
            yield self
        finally:
            self.die()

    def _refresh_counters(self) -> None:
        running = sum(int(np.count_nonzero(lane.live)) for lane in self.lanes)
        pages = self.geometry.lanes * self.geometry.slots_per_lane
        self._counters["generated_tokens"] = sum(lane.totals.generated for lane in self.lanes)
        self._counters["finished"][0] = sum(lane.finished for lane in self.lanes)
        self._counters["running"] = running
        self._counters["kv_pages_total"], self._counters["kv_pages_free"] = pages, pages - running

    def _store_status(self, field: str, value: int) -> None:
        offset = schema.header_offset(schema.ENGINE_STATUS) + schema.ENGINE_STATUS.offset_of(field)
        _atomics.store_release(self._region, offset, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path")
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--arena-bytes", type=int, default=1 << 24)
    parser.add_argument("--log-entries", type=int, default=1 << 15)
    parser.add_argument("--vocabulary-size", type=int, default=49_152)
    parser.add_argument("--max-context-tokens", type=int, default=8_192)
    parser.add_argument("--fingerprint", type=bytes.fromhex, default=FINGERPRINT, help="hexadecimal")
    parser.add_argument("--tokens-per-second", type=float, help="of each request; as fast as possible by default")
    parser.add_argument("--burst", type=int, default=Behaviour.burst, help="most tokens of a request in one step")
    parser.add_argument("--idle-sleep", type=float, default=Behaviour.idle_sleep, help="seconds; 0 polls without rest")
    parser.add_argument("--lease-timeout", type=float, help="seconds; never by default")
    options = parser.parse_args()
    info = RingInfo(
        geometry=RingGeometry(options.lanes, options.slots, options.arena_bytes, options.log_entries),
        fingerprint=options.fingerprint,
        vocabulary_size=options.vocabulary_size,
        max_context_tokens=options.max_context_tokens,
    )
    behaviour = Behaviour(
        tokens_per_second=options.tokens_per_second,
        burst=options.burst,
        idle_sleep=options.idle_sleep,
        lease_timeout=options.lease_timeout,
    )
    with ShmRing.create(options.path, info) as ring:
        engine = StandInEngine(ring.region, behaviour)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: engine.die())
        print("READY", flush=True)
        engine.run()


if __name__ == "__main__":
    main()
