"""The DPU side's view of the host process, and connections to it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from services.ring.verbs.device import Device
from services.ring.verbs.grant import LaneGrant, QueuePairAddress, RemoteRegion
from services.ring.verbs.queue_pair import QueuePair, QueuePairLimits
from services.ring.verbs.transport import VerbsTransport

Forge = Callable[[LaneGrant], LaneGrant]


class HostProcess:
    """Starts at once, is waited for when it is first asked."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rdma.host"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ready = False

    def ask(self, **request: object) -> Any:
        assert self.process.stdin is not None
        if not self._ready:
            self._answer()
            self._ready = True
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def attach(self, lane: int, gateway: QueuePairAddress) -> LaneGrant:
        answer = self.ask(do="attach", lane=lane, gateway=dataclasses.asdict(gateway))
        return LaneGrant(
            lane=answer["lane"],
            ring_bytes=answer["ring_bytes"],
            queue_pair=QueuePairAddress(**answer["queue_pair"]),
            header=RemoteRegion(**answer["header"]),
            inbound=RemoteRegion(**answer["inbound"]),
            outbound=RemoteRegion(**answer["outbound"]),
        )

    def digest(self, offset: int, length: int) -> str:
        return str(self.ask(do="digest", offset=offset, length=length))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the host process ended with {self.process.wait()}"
        return json.loads(line)


@contextlib.contextmanager
def connection(
    host: HostProcess, device: Device, lane: int, forge: Forge | None = None, **limits: int
) -> Iterator[VerbsTransport]:
    """A transport to ``lane``.

    ``forge`` changes its grant, as a hostile gateway could; ``limits`` are its queue pair's.
    """
    queue_pair = QueuePair(device, QueuePairLimits(**limits))
    grant = host.attach(lane, queue_pair.address)
    if forge is not None:
        grant = forge(grant)
    transport = VerbsTransport(queue_pair, grant, staging_bytes=1 << 16, read_bytes=1 << 14)
    try:
        yield transport
    finally:
        transport.close()
