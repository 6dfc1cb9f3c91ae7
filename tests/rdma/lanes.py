"""What the tests of both sides share: the ring's sizes, and a gateway that runs requests over a lane."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from services.ring import schema
from services.ring.lane import LaneClient
from services.ring.schema import LINE_BYTES, FinishReason, LogKind
from services.ring.transport import Transport
from tests.support.rings import ring_info

if TYPE_CHECKING:  # needs pyverbs, which only the emulated machine has
    from services.ring.verbs.transport import VerbsTransport

Connect = Callable[..., AbstractContextManager["VerbsTransport"]]  # (lane=0, forge=None, **limits), the fixture

RING = ring_info(lanes=2, slots=8, arena_bytes=1 << 18, log_entries=1024)
GEOMETRY = RING.geometry
CONTEXT = 256  # tokens, of the scheduling core's sequences
TIME_LIMIT = 20.0  # seconds that anything may take, on slow processors
LEASE_TIMEOUT = 60.0  # seconds
_ARENA_PART = GEOMETRY.arena_bytes // GEOMETRY.slots_per_lane // LINE_BYTES * LINE_BYTES
_epochs = itertools.count(1)


def attach(transport: Transport, lane: int = 0) -> LaneClient:
    client = LaneClient(transport, GEOMETRY, lane, gateway_epoch=next(_epochs), lease_timeout=LEASE_TIMEOUT)
    client.attach(timeout=TIME_LIMIT, poll_interval=0.005)
    return client


class Looks:
    """How often a lane was looked at, and how often there was news."""

    def __init__(self) -> None:
        self.polls = self.with_news = self.acknowledges = 0


def run_requests(
    client: LaneClient, records: Sequence[bytes], looks: Looks | None = None
) -> list[tuple[list[int], FinishReason]]:
    """Submit all, the record of slot i at i; read until each has its FINISH. Their tokens and reasons."""
    looks = looks or Looks()
    numbers = {
        schema.submission_tag(client.submit(record, slot * _ARENA_PART)): slot for slot, record in enumerate(records)
    }
    tokens: list[list[int]] = [[] for _ in records]
    reasons: dict[int, FinishReason] = {}
    deadline = time.monotonic() + TIME_LIMIT
    while len(reasons) < len(records):
        assert time.monotonic() < deadline, f"{len(reasons)} of {len(records)} requests ended within {TIME_LIMIT} s"
        client.poll()
        entries = client.read_log()
        looks.acknowledges += client.acknowledge()
        looks.polls += 1
        looks.with_news += bool(entries.size)
        for entry in entries:
            number = numbers[int(entry["tag"])]  # a KeyError is a token of somebody else's
            assert number not in reasons, f"an entry after FINISH: {entry}"
            if entry["kind"] == LogKind.TOKEN:
                tokens[number].append(int(entry["token"]))
            elif entry["kind"] == LogKind.FINISH:
                reasons[number] = FinishReason(int(entry["detail"]))
        time.sleep(0.001)
    return [(tokens[number], reasons[number]) for number in range(len(records))]
