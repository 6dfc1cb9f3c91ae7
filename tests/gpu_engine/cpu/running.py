"""A cpu engine on a thread of its own over a private ring, and a gateway for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from services.gpu_engine.cpu.engine import CpuEngine
from services.gpu_engine.engine import EngineLimits
from services.gpu_engine.models.checkpoint import Checkpoint
from services.ring import _atomics, schema
from services.ring.header import RingInfo, format_ring, read_status
from services.ring.lane import LaneClient
from services.ring.memory import MemoryTransport, allocate_region
from services.ring.record import pack_record
from services.ring.schema import Command, EngineState, FinishReason, LogKind, RingGeometry

PATIENCE = 60.0  # seconds until a test gives up; nothing is timed


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.0005)


class RunningEngine:
    """The engine, its ring and one attached lane."""

    def __init__(self, checkpoint: Checkpoint, *, slots: int = 16, threads: int = 2, **limits: Any) -> None:
        sizes: dict[str, Any] = {
            "context": 256,
            "page_size": 16,
            "kv_pages": 256,
            "max_running": 16,
            "max_batched_tokens": 64,
            "max_waiting": 64,
            "lease_timeout_ms": 600_000,
        }
        self.limits = EngineLimits(**(sizes | limits))
        self.geometry = RingGeometry(1, slots, 1 << 20, 4096)
        self.region = allocate_region(self.geometry.ring_bytes)
        info = RingInfo(self.geometry, bytes(32), checkpoint.config.vocabulary, self.limits.context)
        format_ring(self.region, info)
        self.transport = MemoryTransport(self.region)
        self.engine = CpuEngine(checkpoint, self.region, self.limits, epoch=7, threads=threads)
        self.failure: BaseException | None = None
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.lane = LaneClient(self.transport, self.geometry, 0, gateway_epoch=3, lease_timeout=1e9)
        self._offset = 0

    def _run(self) -> None:
        try:
            self.engine.run(self.ready.set)
        except BaseException as error:
            self.failure = error

    def start(self) -> None:
        """Begin the control loop and attach the lane."""
        self.thread.start()
        assert self.ready.wait(PATIENCE)
        self.lane.attach(timeout=PATIENCE)

    def stop(self) -> None:
        self.order(Command.STOP)
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()

    def order(self, command: Command) -> None:
        _atomics.store_release(self.region, schema.header_offset(schema.BOOTSTRAP_CONTROL), command)

    @property
    def state(self) -> EngineState:
        return EngineState(int(read_status(self.transport, self.geometry).engine["state"]))

    @property
    def heartbeat(self) -> int:
        return int(read_status(self.transport, self.geometry).engine["heartbeat"])

    @property
    def counters(self) -> np.void:
        return read_status(self.transport, self.geometry).counters

    def submit(self, slot: int, prompt: list[int], max_tokens: int, **options: Any) -> int:
        record = pack_record(prompt, slot=slot, max_tokens=max_tokens, **({"temperature": 0.0} | options))
        size = schema.record_bytes(len(prompt), max_tokens)
        if self._offset + size > self.geometry.arena_bytes:
            self._offset = 0  # callers wait for their requests, so what lay there has ended
        offset = self._offset
        self._offset += size
        return schema.submission_tag(self.lane.submit(record, offset))

    def times(self, tags: list[int]) -> list[list[float]]:
        """Read until all have finished: when each token of each was seen (time.perf_counter), within 0.1 ms."""
        seen: dict[int, list[float]] = {tag: [] for tag in tags}
        finished = 0
        while finished < len(tags):
            self.lane.poll()
            now = time.perf_counter()
            for entry in self.lane.read_log():
                if entry["kind"] == LogKind.TOKEN:
                    seen[int(entry["tag"])].append(now)
                finished += entry["kind"] == LogKind.FINISH
            self.lane.acknowledge(now=True)
            time.sleep(0.0001)
        return list(seen.values())

    def collect(self, tags: list[int]) -> dict[int, tuple[list[int], FinishReason]]:
        """Read until all have finished: tokens and reason of each."""
        tokens: dict[int, list[int]] = {tag: [] for tag in tags}
        reasons: dict[int, FinishReason] = {}

        def read() -> bool:
            self.lane.poll()
            for entry in self.lane.read_log():
                tag = int(entry["tag"])
                if entry["kind"] == LogKind.TOKEN:
                    tokens[tag].append(int(entry["token"]))
                elif entry["kind"] == LogKind.FINISH:
                    reasons[tag] = FinishReason(int(entry["detail"]))
            self.lane.acknowledge(now=True)
            return len(reasons) == len(tags)

        wait_until(read)
        return {tag: (tokens[tag], reasons[tag]) for tag in tags}

    def generate(self, prompts: list[list[int]], max_tokens: int, **options: Any) -> list[list[int]]:
        """All prompts at once; asserts that none was cut short."""
        tags = [self.submit(slot, prompt, max_tokens, **options) for slot, prompt in enumerate(prompts)]
        ended = self.collect(tags)
        assert all(reason in (FinishReason.LENGTH, FinishReason.STOP) for _, reason in ended.values())
        return [ended[tag][0] for tag in tags]


@contextmanager
def running(checkpoint: Checkpoint, **options: Any) -> Iterator[RunningEngine]:
    engine = RunningEngine(checkpoint, **options)
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()
