"""The host side: a process that owns a ring, lets the stand-in engine serve it and exports its lanes on rxe_host.

One JSON object a line asks, one answers::

    {"do": "attach", "lane": 0, "gateway": {...QueuePairAddress}}   -> LaneGrant
    {"do": "detach", "lane": 0}                                     -> null
    {"do": "digest", "offset": 0, "length": 64}                     -> SHA-256 of that part of the ring
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys

from services.ring.verbs.device import Device
from services.ring.verbs.export import LaneExport
from services.ring.verbs.grant import QueuePairAddress
from tests.support.rings import private_ring, ring_info
from tests.support.stand_in_engine import Behaviour, StandInEngine

INFO = ring_info(lanes=2, slots=8, arena_bytes=1 << 18, log_entries=1024)
IDLE_SLEEP = 0.01  # seconds: the emulated machine's two processors are slow


def main() -> None:
    ring = private_ring(INFO)
    device = Device("rxe_host")
    exports: dict[int, LaneExport] = {}
    with StandInEngine(ring, Behaviour(idle_sleep=IDLE_SLEEP)).running():
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            answer: object = None
            if request["do"] == "attach":
                gateway = QueuePairAddress(**request["gateway"])
                if old := exports.pop(request["lane"], None):
                    old.close()
                exports[request["lane"]] = export = LaneExport(device, ring, INFO.geometry, request["lane"], gateway)
                answer = dataclasses.asdict(export.grant)
            elif request["do"] == "detach":
                exports.pop(request["lane"]).close()
            else:
                part = ring[request["offset"] : request["offset"] + request["length"]]
                answer = hashlib.sha256(part.tobytes()).hexdigest()
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
