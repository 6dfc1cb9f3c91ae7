"""A lane of the soak: a gateway that submits at random, cancels, stops reading, falls silent, leaves and comes back."""

from __future__ import annotations

import collections
import random
import time

from bench.soak_requests import GENERATED, PROMPT, Answer, Asker, Repeats, demand
from services.ring.errors import LaneLostError
from services.ring.lane import LaneClient
from services.ring.memory import MemoryTransport, Region
from services.ring.schema import RingGeometry, record_bytes, submission_tag

SPAN = record_bytes(PROMPT, GENERATED)
BURST_RATE = 60.0  # requests a second of a lane in a burst
ATTACH_SECONDS = 10.0
_epochs = iter(range(1_000, 1 << 60))


class SoakLane:
    """One lane and its gateways, one after the other.

    Attributes:
        counts: what has happened, by name.
    """

    def __init__(self, region: Region, geometry: RingGeometry, lane: int, lease: float, asker: Asker) -> None:
        self._transport, self._geometry = MemoryTransport(region), geometry
        self._lane, self._lease, self._asker = lane, lease, asker
        self._random = random.Random(lane)
        self.counts: collections.Counter[str] = collections.Counter()
        now = time.monotonic()
        self._next_event = now + self._random.expovariate(1 / 10)
        self._begin(now)

    def _begin(self, now: float) -> None:
        """A new gateway asks for the lane."""
        self._client = LaneClient(
            self._transport, self._geometry, self._lane, gateway_epoch=next(_epochs), lease_timeout=self._lease
        )
        self._client.begin_attach()
        self._attach_by = now + ATTACH_SECONDS
        self._attached = False
        self._away_until = self._stalled_until = 0.0
        self._live: dict[int, Answer] = {}  # by tag
        self._free = list(range(self._geometry.slots_per_lane))
        self._phase_until, self._bursting, self._next_ask = now, False, now

    @property
    def quiet(self) -> bool:
        """The lane is attached and nothing of it is in flight."""
        return self._attached and not self._live and not self._away_until

    def work(self, now: float, repeats: Repeats, *, submitting: bool) -> None:
        """One turn. Raises SoakError."""
        if self._away_until:
            if now >= self._away_until:
                self._begin(now)
            return
        if not self._attached:
            self._attached = self._client.attached()
            demand(self._attached or now < self._attach_by, "the lane is not given to a new gateway", self._lane)
            return
        try:
            if submitting and now >= self._next_event:
                self._event(now)
            elif now < self._stalled_until:
                self._client.acknowledge()
            else:
                self._read(repeats)
            if submitting and not self._away_until:
                self._submit(now)
        except LaneLostError:
            # This process was stopped for longer than the lease: not the engine's fault, and the lane is lost.
            self.counts["leases lost unawares"] += 1
            self._begin(now)

    def _event(self, now: float) -> None:
        pick = self._random
        self._next_event = now + pick.expovariate(1 / 10)
        event = pick.choice(("stalls", "silences", "detaches"))
        self.counts[event] += 1
        if event == "stalls":
            self._stalled_until = now + pick.uniform(0.5, 3.0)
            return
        if event == "detaches":
            self._client.detach()
            self._away_until = now + pick.uniform(0.0, 1.0)
        else:
            self._away_until = now + self._lease * pick.uniform(0.5, 2.0)  # the engine may have seen it, or not yet
        self.counts["requests abandoned"] += len(self._live)

    def _read(self, repeats: Repeats) -> None:
        client = self._client
        client.poll()
        for tag, slot, kind, detail, token, value in client.read_log().tolist():  # LOG_ENTRY's fields
            demand(tag in self._live, "an entry of no request", self._lane, tag, slot, kind)
            answer = self._live[tag]
            answer.take(kind, token, value, detail)
            if answer.reason is not None:
                self._end(tag, answer, repeats)
            elif len(answer.tokens) == answer.ask.cancel_after and not answer.cancelled:
                self._cancel(answer)
        client.acknowledge()

    def _end(self, tag: int, answer: Answer, repeats: Repeats) -> None:
        assert answer.reason is not None
        repeats.check(answer)
        del self._live[tag]
        self._free.append(answer.slot)
        self.counts["requests ended"] += 1
        self.counts[f"ended with {answer.reason.name}"] += 1
        self.counts["tokens"] += len(answer.tokens)

    def _cancel(self, answer: Answer) -> None:
        answer.cancelled = True
        self._client.cancel(answer.slot, answer.position)
        self.counts["cancels"] += 1

    def _submit(self, now: float) -> None:
        pick = self._random
        if now >= self._phase_until:
            self._bursting = not self._bursting
            self._phase_until = now + pick.uniform(0.5, 3.0)
            self._next_ask = now
        while self._bursting and now >= self._next_ask and self._free:
            self._next_ask += pick.expovariate(BURST_RATE)
            ask, slot = self._asker.ask(), self._free.pop()
            position = self._client.submit(ask.record(slot), slot * SPAN)
            answer = Answer(ask, position, slot, self._asker.vocabulary)
            self._live[submission_tag(position)] = answer
            self.counts["requests"] += 1
            if ask.cancel_after == 0:
                self._cancel(answer)
