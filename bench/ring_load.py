"""Load at a ring, and what its client sees: when each request was submitted and each of its tokens arrived."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.ring.header import read_ring_info, read_status
from services.ring.memory import MemoryTransport, Region
from services.ring.record import pack_record
from services.ring.schema import DescriptorFlag, FinishReason, record_bytes
from tests.gpu_engine.core.machine import Gateway, Stream

PATIENCE = 20.0  # seconds without a token


@dataclass(frozen=True)
class Request:
    """What is asked: ``at`` seconds after the load's begin."""

    at: float
    prompt: Sequence[int]
    max_tokens: int


@dataclass
class Asked:
    """A request in flight or done. Times are of time.perf_counter."""

    submitted: float
    stream: Stream
    slot: int
    arrivals: list[float] = field(default_factory=list)  # of each token

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.submitted

    @property
    def each(self) -> float:
        """Mean seconds from token to token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / (len(self.arrivals) - 1)


class LoadClient:
    """One lane's gateway that spins; each slot has its own part of the arena."""

    def __init__(self, region: Region, epoch: int, *, prompt: int, max_tokens: int, lane: int = 0) -> None:
        """``prompt`` and ``max_tokens`` are the most of a request."""
        transport = MemoryTransport(region)
        self._transport, self._geometry = transport, read_ring_info(transport).geometry
        self._gateway = Gateway(region, self._geometry, lane, epoch)
        self._span = record_bytes(prompt, max_tokens)
        slots = min(self._geometry.slots_per_lane, self._geometry.arena_bytes // self._span)
        self._free = list(range(slots))
        self._open: list[Asked] = []
        self._news = time.perf_counter()
        while not self._gateway.client.attached():
            self._check_patience(time.perf_counter())

    @property
    def steps(self) -> int:
        """Steps that the engine has ended."""
        return int(read_status(self._transport, self._geometry).engine["steps"])

    def submit(self, request: Request) -> Asked:
        """Raises IndexError when no slot is free."""
        slot = self._free.pop()
        packed = pack_record(
            request.prompt,
            slot=slot,
            max_tokens=request.max_tokens,
            temperature=0.0,
            flags=DescriptorFlag.IGNORE_EOS,
        )
        submitted = self._news = time.perf_counter()
        position = self._gateway.submit(packed, slot * self._span)
        asked = Asked(submitted, self._gateway.stream(position), slot)
        self._open.append(asked)
        return asked

    def read(self) -> bool:
        """Read what is new; whether anything is in flight. Raises RuntimeError when nothing has come for long."""
        self._gateway.read()
        now = time.perf_counter()
        ended = False
        for asked in self._open:
            if new := len(asked.stream.tokens) - len(asked.arrivals):
                asked.arrivals += [now] * new
                self._news = now
            ended |= asked.stream.reason is not None
        if self._open:
            self._check_patience(now)
        else:
            self._news = now
        if ended:
            for asked in [asked for asked in self._open if asked.stream.reason is not None]:
                if asked.stream.reason is not FinishReason.LENGTH:
                    raise RuntimeError(f"a request ended with {asked.stream.reason!r} {asked.stream.code!r}")
                self._open.remove(asked)
                self._free.append(asked.slot)
        return bool(self._open)

    def _check_patience(self, now: float) -> None:
        if now - self._news > PATIENCE:
            raise RuntimeError(f"the engine has been silent for {PATIENCE:.0f} s")

    def run(self, requests: Sequence[Request]) -> list[Asked]:
        """Submit each at its time, read until all have ended."""
        began, asked, left = time.perf_counter(), [], list(reversed(requests))
        while left or self._open:
            while left and time.perf_counter() - began >= left[-1].at and self._free:
                asked.append(self.submit(left[-1]))
                asked[-1].submitted = began + left.pop().at  # a request that had to wait for a slot has waited
            self.read()
        return asked

    def one_at_a_time(self, requests: Sequence[Request], seconds: float) -> list[Asked]:
        """Each once the one before has ended, for so long."""
        began, asked = time.perf_counter(), []
        for request in requests:
            if time.perf_counter() - began > seconds:
                break
            asked.append(self.submit(request))
            while self.read():
                pass
        return asked


def poisson(
    rate: float, seconds: float, *, prompt: tuple[int, int], max_tokens: int, vocabulary: int, seed: int
) -> list[Request]:
    """Requests that arrive at random, ``rate`` a second, prompts of a random length of the range; by seed the same."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate, int(rate * seconds)))
    lengths = random.integers(prompt[0], prompt[1] + 1, arrivals.size)
    return [
        Request(float(at), random.integers(0, vocabulary, length).tolist(), max_tokens)
        for at, length in zip(arrivals, lengths, strict=True)
    ]
