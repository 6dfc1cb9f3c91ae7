"""One attachment to one engine: what the worker holds in its lane from attach to loss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing, suppress

import numpy as np
import numpy.typing as npt

from services.dpu_gateway.arena import Arena
from services.dpu_gateway.arrival import arrive, room
from services.dpu_gateway.cadence import Cadence
from services.dpu_gateway.errors import FieldError, GatewayError, Overload, OverloadedError
from services.dpu_gateway.liveness import Liveness
from services.dpu_gateway.model import Model
from services.dpu_gateway.names import Claim, Names
from services.dpu_gateway.reader import TokenReader
from services.dpu_gateway.record import record_of
from services.dpu_gateway.request import Request
from services.dpu_gateway.settings import GatewaySettings
from services.dpu_gateway.slots import SlotTracker
from services.dpu_gateway.streams import RequestName, Stream
from services.dpu_gateway.ticker import Ticker
from services.dpu_gateway.turns import Turns
from services.dpu_gateway.waiting import Waiting
from services.ring.errors import RingError
from services.ring.header import RingInfo, RingStatus, parse_status, start_status
from services.ring.lane import LaneClient
from services.ring.schema import FinishReason, record_bytes, submission_tag
from services.ring.transport import PendingRead, Transport

LOOKS_PER_LEASE = 10  # each look renews the lease when that is due

# Requests that the engine refused never occupied their slot, so its status will not say that it is free.
NEVER_IN_SLOT = frozenset({FinishReason.REJECTED, FinishReason.QUEUE_FULL, FinishReason.SHUTDOWN})


class Session:
    """The lane's slots, arena, streams and reader. Owned by the event loop, which no method but ``close`` holds up."""

    def __init__(
        self,
        *,
        transport: Transport,
        info: RingInfo,
        lane: LaneClient,
        model: Model,
        engine_epoch: int,
        lease_timeout: float,
        settings: GatewaySettings,
    ) -> None:
        self.model = model
        self.lane = lane
        self.engine_epoch = engine_epoch
        self.liveness = Liveness(engine_epoch, settings.heartbeat_timeout, settings.progress_timeout)
        self.geometry = info.geometry
        self._transport = transport
        self._settings = settings
        self._slots = SlotTracker(info.geometry.slots_per_lane, self._slot_statuses)
        self._arena = Arena(info.geometry.arena_bytes)
        self._waiting = Waiting(info.geometry.slots_per_lane)
        self._reader = TokenReader(
            lane, settings.max_unsent_entries, self._finished, self._too_slow, self._waiting, wake=Turns().add
        )
        self._cadence = Cadence(
            fast=settings.poll_fast_us / 1e6,
            slow=settings.poll_slow_us / 1e6,
            idle=min(settings.watch_interval, lease_timeout / LOOKS_PER_LEASE),
            longest_gap=settings.longest_chunk_gap,
        )
        self._ticker: Ticker | None = None  # while run
        self._status: PendingRead | None = None  # the last look at the header, perhaps under way
        self._names = Names()
        self._shed: dict[int, asyncio.Future[None]] = {}  # by slot: done when the engine has let go of it
        self._promised = 0  # slots that are being freed for somebody

    # Requests

    def claim(self, name: RequestName) -> Claim:
        """Make the name this request's until the engine has finished it or ``leave``. Raises FieldError."""
        return self._names.claim(name)

    async def reserve(self, priority: int = 0) -> int:
        """A slot for a request that will be submitted or given back; a waiting one of lower priority may lose its.

        Raises OverloadedError, and RingError or UnavailableError when the lane is lost.
        """
        slot = await self._slots.take() if self._slots.available > self._promised else None
        while slot is None:
            self._promised += 1
            try:
                if not await self.make_room(priority):
                    raise OverloadedError(
                        Overload.NO_SLOT, f"all {self._slots.slots} slots are in use", self._settings.retry_after
                    )
                slot = await self._slots.take()
            finally:
                self._promised -= 1
        return slot

    async def make_room(self, priority: int, arena_bytes: int = 0) -> bool:
        """Shed the newest of the waiting requests whose priority is lowest, and return once the engine has let go of
        it. False, and nobody is shed, when none of them has less than ``priority``, or all of those together would not
        leave ``arena_bytes``. Raises UnavailableError when the engine is lost."""
        if arena_bytes and self._arena_bytes_below(priority) < arena_bytes:
            return False
        slot = self._waiting.victim(priority)
        victim = None if slot is None else self._reader.stream_in(slot)
        if slot is None or victim is None:
            return False
        self._waiting.remove(slot)
        self._cancel(victim)
        victim.fail(
            OverloadedError(
                Overload.SHED, "the request waited and gave way to one of higher priority", self._settings.retry_after
            )
        )
        self._shed[slot] = gone = asyncio.get_running_loop().create_future()
        await gone
        return True

    def release(self, slot: int) -> None:
        """Give back a reservation."""
        self._slots.untake(slot)

    def _arena_bytes_below(self, priority: int) -> int:
        """What would be free without those that may be shed for ``priority``, in however many pieces."""
        streams = (self._reader.stream_in(slot) for slot in self._waiting.below(priority).tolist())
        return self._arena.free_bytes + sum(self._arena.length_at(each.span) for each in streams if each is not None)

    async def room(self) -> None:
        """Await it before ``submit``: over a link that does not keep up, its writes would wait. Raises RingError."""
        await room(self._transport)

    def submit(self, claim: Claim, request: Request, slot: int, prompt: list[int], max_tokens: int) -> Stream:
        """Write the request into the lane. The reservation becomes the stream's, and the stream the claim's.

        Raises:
            OverloadedError: the arena has no room for it now.
            FieldError: the arena never has.
            RingError: the lane is lost.
        """
        length = record_bytes(len(prompt), max_tokens)
        if length > self._arena.size:
            raise FieldError(
                "stop.max_tokens",
                f"is {max_tokens}: with the prompt's {len(prompt)} tokens it needs {length} bytes of the gateway's "
                f"arena, which has {self._arena.size}",
            )
        span = self._arena.allocate(length)
        if span is None:
            raise OverloadedError(Overload.ARENA_FULL, "the gateway's prompt arena is full", self._settings.retry_after)
        try:
            record = record_of(request, slot, prompt, max_tokens, self.model.card.fingerprint)
            position = self.lane.submit(record, span)
        except BaseException:
            self._arena.free(span)
            raise
        tag = submission_tag(position)
        stream = claim.stream = Stream(
            claim.name,
            slot=slot,
            position=position,
            tag=tag,
            span=span,
            with_logprobs=request.logprobs is not None,
        )
        self._reader.add(stream)
        self._waiting.add(slot, position, request.priority)
        if claim.aborted:
            self._abort(stream)
        self._cadence.hurry()
        if self._ticker is not None:
            self._ticker.set_period(self._cadence.period)
        return stream

    def leave(self, claim: Claim, error: GatewayError) -> None:
        """Nobody waits for the request any more: its name is free at once, its slot after the engine's FINISH."""
        if claim.stream is not None:
            self._give_up(claim.stream, error)
        self._names.free(claim)

    def _give_up(self, stream: Stream, error: GatewayError) -> None:
        self._cancel(stream)
        stream.fail(error)
        self._names.free_of(stream)

    def _cancel(self, stream: Stream) -> None:
        if stream.finish is FinishReason.NONE:
            with suppress(RingError):  # a lost lane has no requests left
                self.lane.cancel(stream.slot, stream.position)

    def abort(self, name: RequestName) -> bool:
        """Cancel by name; its stream finishes as CANCELLED. Whether there was such a request."""
        claim = self._names.find(name)
        if claim is None:
            return False
        claim.aborted = True
        if claim.stream is not None:
            self._abort(claim.stream)
        return True

    def _abort(self, stream: Stream) -> None:
        stream.abort_requested = True
        self._cancel(stream)

    def fail_all(self, error: GatewayError) -> None:
        """End every open stream with ``error``."""
        for stream in self._reader.streams():
            stream.fail(error)
        for gone in self._shed.values():
            if not gone.done():
                gone.set_exception(error)
        self._shed.clear()

    @property
    def look_period(self) -> float:
        """Seconds until the next look at the token log."""
        return self._cadence.period

    @property
    def free_slots(self) -> int:
        return self._slots.available

    @property
    def free_arena_bytes(self) -> int:
        return self._arena.free_bytes

    def _finished(self, stream: Stream) -> None:
        self._arena.free(stream.span)
        if stream.finish is not FinishReason.QUEUE_FULL:  # that one may be tried again
            self._names.free_of(stream)
        if stream.finish in NEVER_IN_SLOT and not stream.accepted:
            self._slots.untake(stream.slot)
        else:
            self._slots.ended(stream.slot, stream.tag)
        gone = self._shed.pop(stream.slot, None)
        if gone is not None and not gone.done():
            gone.set_result(None)

    def _too_slow(self, stream: Stream) -> None:
        self._give_up(
            stream,
            OverloadedError(
                Overload.SLOW_READER,
                f"the stream is read too slowly: {stream.unsent} tokens wait",
                self._settings.retry_after,
            ),
        )

    # The worker's one loop

    async def run(self) -> None:
        """Read tokens, renew the lease and watch the engine until it is lost. Raises EngineLostError or RingError."""
        next_watch = 0.0
        ticks = 1
        cadence = self._cadence
        with closing(Ticker()) as ticker:
            self._ticker = ticker
            while True:
                now = time.monotonic()
                if now >= next_watch:
                    self.liveness.look(await self.read_status())
                    next_watch = now + self._settings.watch_interval
                found = await self._reader.look(self._arrived, time.monotonic, cadence.gap)
                cadence.after_look(found=found, live=self._reader.live > 0, late=ticks > 1)
                ticker.set_period(cadence.period)
                ticks = await ticker.wait()

    async def _arrived(self, reads: Sequence[PendingRead]) -> None:
        await arrive(self._transport, reads)

    async def _slot_statuses(self) -> npt.NDArray[np.uint64]:
        read = self.lane.start_slot_statuses()
        await self._arrived([read])
        return self.lane.slot_statuses(read)

    async def read_status(self) -> RingStatus:
        """The ring's header as it is now; whoever comes while a read is under way shares it, so that any number of
        scrapes costs one. Raises TransportLostError."""
        if self._status is None or self._status.done:
            self._status = start_status(self._transport, self.geometry)
        status = self._status
        await self._arrived([status])
        return parse_status(status.data, self.geometry)

    async def close(self) -> None:
        """Give the lane back, if it is still ours, and let go of the ring. A silent link holds up nobody else."""
        try:
            with suppress(RingError):
                self.lane.detach()
                if self.liveness.serving:  # an engine that is gone would be waited for in vain
                    await self._arrived([start_status(self._transport, self.geometry)])
                    self._transport.flush()
        finally:
            self._transport.close()
