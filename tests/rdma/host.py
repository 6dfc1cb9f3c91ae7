"""The host side: a process that owns a ring, lets an engine serve it and exports its lanes on rxe_host.

One JSON object a line asks, one answers::

    {"do": "serve", "engine": "stand-in"}  or core, or split       -> null; what was served before is gone
    {"do": "attach", "lane": 0, "gateway": {...QueuePairAddress}}   -> LaneGrant
    {"do": "detach", "lane": 0}                                     -> null
    {"do": "digest", "offset": 0, "length": 64}                     -> SHA-256 of that part of the ring
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from services.ring.parts import HostPart, RingParts
from services.ring.verbs.device import Device
from services.ring.verbs.export import LaneExport
from services.ring.verbs.grant import QueuePairAddress
from tests.gpu_engine.core.machine import Machine
from tests.rdma.lanes import CONTEXT, GEOMETRY, RING
from tests.support.rings import private_ring
from tests.support.stand_in_engine import Behaviour, StandInEngine

IDLE_SLEEP = 0.005  # seconds: the emulated machine's two processors are slow


@contextmanager
def stand_in() -> Iterator[RingParts]:
    ring = private_ring(RING)
    with StandInEngine(ring, Behaviour(idle_sleep=IDLE_SLEEP)).running():
        yield [HostPart(0, ring)]


@contextmanager
def scheduling_core(*, split: bool = False) -> Iterator[RingParts]:
    """The product's C++ scheduler, with an executor whose tokens tell what it read from the KV cache.

    ``split`` puts what it writes for gateways into memory of its own.
    """
    machine = Machine(
        lanes=GEOMETRY.lanes,
        slots=GEOMETRY.slots_per_lane,
        arena_bytes=GEOMETRY.arena_bytes,
        log_entries=GEOMETRY.log_entries,
        max_context=CONTEXT,
        page_count=512,
        lease_us=1 << 40,  # its time passes by steps
        split=split,
    )
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            if not machine.step():
                stopped.wait(IDLE_SLEEP)

    thread = threading.Thread(target=run, name="core", daemon=True)
    thread.start()
    try:
        yield machine.parts
    finally:
        stopped.set()
        thread.join()


ENGINES: dict[str, Callable[[], AbstractContextManager[RingParts]]] = {
    "stand-in": stand_in,
    "core": scheduling_core,
    "split": partial(scheduling_core, split=True),
}


def digest(parts: RingParts, offset: int, length: int) -> str:
    for part in parts:
        if isinstance(part, HostPart) and 0 <= offset - part.start < part.length:
            inside = offset - part.start
            return hashlib.sha256(part.region[inside : inside + length].tobytes()).hexdigest()
    raise ValueError(f"{offset} is in no part of the ring")


class Host:
    """One ring at a time, and the ways to its lanes."""

    def __init__(self) -> None:
        self._device = Device("rxe_host")
        self._exports: dict[int, LaneExport] = {}
        self._parts: RingParts = []
        self._engine = ExitStack()

    def serve(self, engine: str) -> None:
        for lane in list(self._exports):
            self.detach(lane)
        self._engine.close()
        self._parts = self._engine.enter_context(ENGINES[engine]())

    def attach(self, lane: int, gateway: dict[str, Any]) -> dict[str, Any]:
        if lane in self._exports:
            self.detach(lane)
        export = LaneExport(self._device, self._parts, GEOMETRY, lane, QueuePairAddress(**gateway))
        self._exports[lane] = export
        return dataclasses.asdict(export.grant)

    def detach(self, lane: int) -> None:
        self._exports.pop(lane).close()

    def digest(self, offset: int, length: int) -> str:
        return digest(self._parts, offset, length)


def main() -> None:
    host = Host()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(host, request.pop("do"))(**request)), flush=True)


if __name__ == "__main__":
    main()
