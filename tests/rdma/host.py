"""The host side: a process that owns a ring, lets an engine serve it and exports its lanes on rxe_host.

``python -m tests.rdma.host stand-in``, ``... core`` or ``... split``. One JSON object a line asks, one answers::

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
from contextlib import AbstractContextManager, contextmanager
from functools import partial

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


def main() -> None:
    device = Device("rxe_host")
    exports: dict[int, LaneExport] = {}
    with ENGINES[sys.argv[1]]() as parts:
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            answer: object = None
            if request["do"] == "attach":
                gateway = QueuePairAddress(**request["gateway"])
                if old := exports.pop(request["lane"], None):
                    old.close()
                exports[request["lane"]] = export = LaneExport(device, parts, GEOMETRY, request["lane"], gateway)
                answer = dataclasses.asdict(export.grant)
            elif request["do"] == "detach":
                exports.pop(request["lane"]).close()
            else:
                answer = digest(parts, request["offset"], request["length"])
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
