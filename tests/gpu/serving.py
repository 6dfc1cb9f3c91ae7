"""A control loop with a stand-in step, serving a shared-memory ring that this process plays the gateways of."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from services.gpu_engine.cuda.assemble import SchedulerPlace, make_loop
from services.gpu_engine.cuda.compiler import Compiler, default_cache
from services.gpu_engine.cuda.control_loop.build import THREADS
from services.gpu_engine.cuda.control_loop.loop import ControlLoop
from services.gpu_engine.cuda.driver import Buffer, Device, Module, Stream
from services.gpu_engine.cuda.engine import CudaEngine
from services.gpu_engine.cuda.graph_cache import DecodeSteps, Record
from services.gpu_engine.cuda.ring_memory import RingPlace
from services.gpu_engine.cuda.step_arrays import StepAddresses
from services.gpu_engine.cuda.step_loop import LoopConfig, StepLoop
from services.gpu_engine.engine import MovedRing
from services.ring import schema
from services.ring.header import RingInfo, RingStatus, read_ring_info, read_status
from services.ring.memory import MemoryTransport
from services.ring.schema import Command, RingGeometry
from services.ring.shm import ShmRing
from services.ring.transport import Transport
from tests.gpu_engine.core.machine import EOS, VOCABULARY, Gateway
from tests.support.parted_ring import PartedTransport

COMMAND = schema.header_offset(schema.BOOTSTRAP_CONTROL)
PATIENCE = 20.0  # seconds; nothing here takes a tenth of that


class _StandIn(ctypes.Structure):
    """StandIn of stand_in_step.cu."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, ctypes.c_uint64) for name in ("counts", "token_ids", "positions", "row_start", "kv_length")),
        *((name, ctypes.c_uint64) for name in ("sequence", "page_table", "sample_row", "sampling", "history")),
        *((name, ctypes.c_uint64) for name in ("tokens", "logprobs", "top_tokens", "top_logprobs")),
        *((name, ctypes.c_uint64) for name in ("cache", "faults")),
        *((name, ctypes.c_uint32) for name in ("pages_per_sequence", "page_size", "vocabulary")),
    ]


class StandInStep:
    """Launches the stand-in's kernels over the control loop's step.

    Args:
        most_decode: rows of the largest graph for steps in which every row is one token.
    """

    def __init__(
        self, device: Device, step: StepAddresses, config: LoopConfig, vocabulary: int, *, most_decode: int
    ) -> None:
        self._decode, self._most_decode = False, most_decode
        source = "tests/gpu/stand_in_step.cu"
        self._module = Module(Compiler(device.arch, default_cache()).build((source,), {}))
        self._cache = Buffer.of(np.full(config.page_count * config.page_size, -1, np.int32))
        self._faults = Buffer.of(np.zeros(1, np.uint64))
        self._rows = config.max_running
        names = [name for name, _ in _StandIn._fields_]
        known = {name: getattr(step, name) for name in names if hasattr(step, name)}
        self.argument = _StandIn(
            **known,
            cache=self._cache.pointer,
            faults=self._faults.pointer,
            page_size=config.page_size,
            vocabulary=vocabulary,
        )

    def decoding(self) -> StandInStep:
        """The same step, of the graphs for steps in which every row is one token."""
        other = copy.copy(self)
        other._decode = True
        return other

    def record(self, stream: Stream, bucket: int) -> None:
        rows = min(bucket, self._rows)
        kind = (ctypes.c_uint32(number) for number in (bucket, self._decode, self._most_decode))
        self._module.kernel("stand_in_write").launch(stream, (rows, 1, 1), 64, (self.argument, *kind))
        self._module.kernel("stand_in_sample").launch(stream, (-(-rows // 32), 1, 1), 32, (self.argument,))

    def delayed(self, microseconds: float) -> Record:
        """``record``, with a pause in it."""

        def record(stream: Stream, bucket: int) -> None:
            pause = ctypes.c_uint64(int(microseconds * 1000))
            self._module.kernel("stand_in_delay").launch(stream, (1, 1, 1), 1, (pause,))
            self.record(stream, bucket)

        return record

    def faulting(self, kernel: str, token: int) -> Record:
        """``record``, after a kernel that destroys the context when a step's first token is ``token``."""

        def record(stream: Stream, bucket: int) -> None:
            fault = self._module.kernel(kernel)
            fault.launch(stream, (1, 1, 1), 1, (self.argument, ctypes.c_int32(token)))
            self.record(stream, bucket)

        return record

    def faults(self) -> int:
        """Only after the loop's end."""
        return int(self._faults.download(np.uint64, (1,))[0])


class Serving:
    """A running engine and its ring."""

    def __init__(self, ring: ShmRing, loop: StepLoop, step: StandInStep, moved: MovedRing | None = None) -> None:
        self.path, self.region, self.loop, self.step = ring.path, ring.region, loop, step
        self.geometry = read_ring_info(MemoryTransport(ring.region)).geometry
        self.transport: Transport = MemoryTransport(ring.region)
        if moved is not None:  # by copies to what is in GPU memory, in place to the rest
            rest = MemoryTransport(ring.region[moved.transport.size :])
            self.transport = PartedTransport(moved.transport, rest)
        self.engine = CudaEngine(loop, self.transport)
        self.stopped = False
        self._epochs = 100

    @property
    def gpu_loop(self) -> ControlLoop:
        """The loop, which is the GPU's."""
        assert isinstance(self.loop, ControlLoop)
        return self.loop

    def attach(self, lane: int = 0) -> Gateway:
        self._epochs += 1
        gateway = Gateway(self.transport, self.geometry, lane, self._epochs)
        until(gateway.client.attached)
        return gateway

    def status(self) -> RingStatus:
        return read_status(self.transport, self.geometry)

    def order(self, command: Command) -> None:
        self.transport.write(COMMAND, command.to_bytes(8, "little"), flag=True)

    def stop(self) -> None:
        """STOP, and wait for the loop's end. Raises ControlLoopError."""
        if not self.stopped:
            self.stopped = True
            self.order(Command.STOP)
            self.wait()

    def wait(self) -> None:
        """Wait for the loop's end. Raises ControlLoopError."""
        deadline = time.monotonic() + PATIENCE
        while not self.loop.ended:
            if time.monotonic() > deadline:  # whatever the host does with the device now would wait forever
                print(f"the control loop does not end; ring: {self.status()}", file=sys.stderr, flush=True)
                os._exit(3)
            time.sleep(0.001)
        self.engine.wait()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("no end in sight")


def finish(*gateways: Gateway) -> None:
    """Read until every submission has ended."""

    def all_ended() -> bool:
        for gateway in gateways:
            gateway.read()
        return all(stream.reason is not None for gateway in gateways for stream in gateway.streams.values())

    until(all_ended)


@contextmanager
def serving(
    *,
    lanes: int = 1,
    slots: int = 8,
    arena_bytes: int = 1 << 14,
    log_entries: int = 256,
    max_context: int = 64,
    vocabulary: int = VOCABULARY,
    buckets: Sequence[int] = (1, 2, 4, 8, 16),
    decode_buckets: Sequence[int] = (2, 4),
    make_record: Callable[[StandInStep], Record] = lambda step: step.record,
    scheduler: SchedulerPlace = "gpu",
    ring_place: RingPlace = "host",
    threads: int = THREADS,
    trace: bool = False,
    prefix_cache: bool = False,
    share_decoded: bool = False,
    **settings: int,
) -> Iterator[Serving]:
    """An engine that is READY; stopped at the end."""
    sizes = {"page_size": 4, "page_count": 64, "max_running": 8, "max_batched_tokens": 16, "priority_boost": 4}
    config = LoopConfig(
        **{**sizes, **settings}, prefix_cache=prefix_cache, share_decoded=share_decoded, eos_token_ids=[EOS]
    )
    info = RingInfo(RingGeometry(lanes, slots, arena_bytes, log_entries), bytes(32), vocabulary, max_context)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        ShmRing.create(Path(folder) / "ring", info) as ring,
    ):
        device = Device()
        compiler = Compiler(device.arch, default_cache())
        place: dict[str, Any] = {"config": config, "region": ring.region, "epoch": time.time_ns()}
        loop, memory = make_loop(
            scheduler, device, compiler, **place, ring_place=ring_place, threads=threads, trace=trace
        )
        engine: Serving | None = None
        try:
            step = StandInStep(device, loop.step, config, vocabulary, most_decode=max(decode_buckets, default=0))
            decode = DecodeSteps(make_record(step.decoding()), decode_buckets) if decode_buckets else None
            loop.capture(make_record(step), buckets, decode=decode)
            engine = Serving(ring, loop, step, None if memory is None else memory.moved())
            del loop, step
            with _fair_turns():
                engine.engine.start()
                yield engine
                engine.stop()
        finally:
            if engine is not None:
                engine.stop()
                # A failed test's traceback keeps the engine; freeing its memory later would wait for the next loop.
                vars(engine).clear()
            if memory is not None:
                memory.close()
            gc.collect()


@contextmanager
def _fair_turns() -> Iterator[None]:
    """The host-driven loop and the gateways are threads of one interpreter: let neither wait long for the other."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
