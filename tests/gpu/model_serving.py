"""A real model on the control loop, behind a shared-memory ring that this process plays the gateway of."""

from __future__ import annotations

import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from services.gpu_engine.cuda.assemble import Model, SchedulerPlace, assemble
from services.gpu_engine.engine import EngineLimits, Precision
from services.ring import _atomics, schema
from services.ring.header import RingInfo, RingStatus, read_status
from services.ring.memory import MemoryTransport
from services.ring.record import pack_record
from services.ring.schema import Command, DescriptorFlag, RingGeometry, record_bytes
from services.ring.shm import ShmRing
from tests.gpu_engine.core.machine import Gateway, Stream

COMMAND = schema.header_offset(schema.BOOTSTRAP_CONTROL)


class Client:
    """One lane; requests take its slots in turn, and the arena from its start once all have ended.

    Attributes:
        ended: whether the engine's loop is over, by a failure of the GPU, say.
    """

    def __init__(self, gateway: Gateway, status: Callable[[], RingStatus], ended: Callable[[], bool]) -> None:
        self.gateway = gateway
        self.status = status
        self.ended = ended
        self._slot = self._offset = 0
        self._open: list[Stream] = []

    def submit(self, prompt: Sequence[int], max_tokens: int, *, seed: int = 0, temperature: float = 0.0) -> Stream:
        if not self._open:
            self._slot = self._offset = 0
        record = pack_record(
            prompt,
            slot=self._slot,
            max_tokens=max_tokens,
            seed=seed,
            temperature=temperature,
            flags=DescriptorFlag.IGNORE_EOS,
        )
        position = self.gateway.submit(record, self._offset)
        self._slot += 1
        self._offset += record_bytes(len(prompt), max_tokens)
        stream = self.gateway.stream(position)
        self._open.append(stream)
        return stream

    def read(self) -> bool:
        """Read what is new; whether any request is still open."""
        self.gateway.read()
        self._open = [stream for stream in self._open if stream.reason is None]
        return bool(self._open)

    def preemptions(self) -> int:
        """So far; ``status`` is refreshed once a step."""
        return int(self.status().counters["preemptions"])

    def finish(self, limit: float = 30.0) -> None:
        deadline = time.monotonic() + limit
        while self.read():
            assert not self.ended(), "the engine has ended before its requests"
            assert time.monotonic() < deadline, "no end in sight"


@contextmanager
def serving_model(
    model: Model,
    limits: EngineLimits,
    *,
    scheduler: SchedulerPlace = "gpu",
    slots: int = 256,
    arena_bytes: int = 1 << 23,
    stored_fp8: frozenset[str] = frozenset(),
    kv_cache: Precision = "bf16",
) -> Iterator[Client]:
    """An engine that is READY and has one lane; stopped at the end."""
    geometry = RingGeometry(lanes=1, slots_per_lane=slots, arena_bytes=arena_bytes, log_entries=1 << 14)
    info = RingInfo(geometry, bytes(32), model.config.vocabulary, limits.context)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ShmRing.create(Path(folder) / "ring", info) as ring:
        epoch = time.time_ns()
        engine = assemble(
            model,
            ring.region,
            limits,
            epoch=epoch,
            progress=lambda *_: None,
            scheduler=scheduler,
            stored_fp8=stored_fp8,
            kv_cache=kv_cache,
        )
        try:
            engine.start()
            gateway = Gateway(ring.region, geometry, 0, 1)
            while not gateway.client.attached():
                assert not engine.loop.ended, "the engine has ended before it was asked anything"
                time.sleep(0.001)
            status = partial(read_status, MemoryTransport(ring.region), geometry)
            # A caller may keep the client until its next engine runs, and to free a step graph then would wait for
            # that engine's control loop: the client does not hold this one.
            loop = weakref.ref(engine.loop)
            yield Client(gateway, status, lambda: (running := loop()) is None or running.ended)
        finally:  # whatever went wrong: nothing may be freed or unmapped while the loop or a step runs
            _atomics.store_release(ring.region, COMMAND, Command.STOP)
            engine.wait()
