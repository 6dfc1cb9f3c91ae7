"""What the worker knows of one request between the token log and the gRPC stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.dpu_gateway.errors import (
    EngineRejectedError,
    GatewayError,
    Overload,
    OverloadedError,
    UnavailableError,
)
from services.ring import dtypes
from services.ring.schema import FinishReason, LogKind, RejectCode

Entries = npt.NDArray[np.void]
LAST_WRITE_SECONDS = 0.5  # that a write may still take when its stream has failed


class RequestName(NamedTuple):
    """What a running request is known by: callers with different API keys share no ids."""

    owner: str  # the key's name; empty where no keys are asked for
    request_id: str


class Stream:
    """Filled by the token reader, emptied by the request's coroutine.

    The coroutine sleeps in ``wait``. While it is busy writing, or not woken yet, tokens gather and leave together: a
    slow client or a busy worker gets larger chunks, not a longer queue of them. ``slot``, ``tag`` and ``span`` say what
    the request occupies in the lane.
    """

    __slots__ = (
        "_changed",
        "_entries",
        "_finish",
        "_reject_code",
        "_tokens",
        "_unsent",
        "_waiter",
        "_write_limit",
        "abort_requested",
        "accepted",
        "cached_tokens",
        "error",
        "held",
        "name",
        "position",
        "queue_seconds",
        "slot",
        "span",
        "tag",
        "with_logprobs",
        "woken_at",
    )

    def __init__(
        self, name: RequestName, *, slot: int, position: int, tag: int, span: int, with_logprobs: bool
    ) -> None:
        self.name = name
        self.slot = slot
        self.position = position  # of the submission in the lane
        self.tag = tag
        self.span = span  # offset of the record in the arena
        self.with_logprobs = with_logprobs
        self.accepted = False  # the engine has queued it
        self.queue_seconds = 0.0  # until the engine first admitted it, by the engine's clock
        self.cached_tokens = 0  # of the prompt, as found when the engine first admitted it
        self.abort_requested = False
        self.held = False  # fed but not woken: the reader's note
        self.woken_at = 0.0  # for tokens, by the reader
        self.error: GatewayError | None = None
        self._finish = FinishReason.NONE
        self._reject_code = 0
        self._tokens: list[int] = []
        self._entries: list[Entries] = []  # instead of tokens when log-probabilities are wanted
        self._unsent = 0
        self._changed = False
        self._waiter: asyncio.Future[None] | None = None
        self._write_limit: asyncio.Timeout | None = None  # while the coroutine writes

    @property
    def unsent(self) -> int:
        """Log entries that the coroutine has not taken yet."""
        return self._unsent

    @property
    def finish(self) -> FinishReason:
        """How the engine ended the request; NONE while it runs."""
        return self._finish

    # The reader's side

    def accept(self) -> None:
        if not self.accepted:
            self.accepted = True
            self.wake()

    def admit(self, seconds: float, cached_tokens: int) -> None:
        """The engine's ADMITTED: queued for so long, so many tokens of the prompt found in its prefix cache."""
        self.queue_seconds = seconds
        self.cached_tokens = cached_tokens
        self.accept()

    def feed_tokens(self, tokens: list[int]) -> None:
        if self.error is not None:
            return
        self._tokens += tokens
        self._unsent += len(tokens)

    def feed_entries(self, entries: Entries) -> None:
        """TOKEN entries, each preceded by its TOP_LOGPROBs; [entries] of dtypes.LOG_ENTRY."""
        if self.error is not None:
            return
        self._entries.append(entries)
        self._unsent += len(entries)

    def end(self, reason: FinishReason, reject_code: int = 0) -> None:
        """The engine's FINISH."""
        self._finish = reason
        self._reject_code = reject_code
        self.wake()

    def fail(self, error: GatewayError) -> None:
        """End the stream without the engine's word; what was not sent is dropped."""
        if self.error is None:
            self.error = error
            self._tokens, self._entries, self._unsent = [], [], 0
            self.wake()
            # A client that does not read would let the write wait for ever. A limit that has expired can't be moved.
            if self._write_limit is not None and not self._write_limit.expired():
                self._write_limit.reschedule(asyncio.get_running_loop().time() + LAST_WRITE_SECONDS)

    def wake(self) -> None:
        """Let the coroutine send what it was fed."""
        self._changed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The coroutine's side

    async def wait(self) -> None:
        """Return when ``wake`` was called since the last time."""
        if not self._changed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._changed = False

    async def send(self, writing: Awaitable[object], limit: float, retry_after: float) -> None:
        """Await a write to the client.

        It is given up soon when the stream fails meanwhile, or after ``limit`` seconds, which is a failure too: raises
        what the stream failed with.
        """
        try:
            async with asyncio.timeout(limit) as self._write_limit:
                await writing
        except TimeoutError:
            if self._write_limit is None or not self._write_limit.expired():
                raise
            if self.error is None:
                self.error = OverloadedError(
                    Overload.SLOW_READER, f"the stream was not read for {limit:g} s", retry_after
                )
            raise self.error from None
        finally:
            self._write_limit = None

    def raise_failure(self, retry_after: float) -> None:
        """Raise what the request failed with, if it did."""
        if self.error is not None:
            raise self.error
        match self._finish:
            case FinishReason.REJECTED:
                raise EngineRejectedError(_reject_name(self._reject_code))
            case FinishReason.QUEUE_FULL if not self.abort_requested:
                raise OverloadedError(Overload.QUEUE_FULL, "the engine's queue is full", retry_after)
            case FinishReason.SHUTDOWN:
                raise UnavailableError("the engine is shutting down", retry_after)
            case FinishReason.CANCELLED if not self.abort_requested:
                raise UnavailableError("the engine cancelled the request", retry_after)

    def take_tokens(self) -> list[int]:
        """Ids that came since the last call."""
        tokens, self._tokens = self._tokens, []
        self._unsent -= len(tokens)
        return tokens

    def take_entries(self) -> Entries:
        """Whole tokens' entries that came since the last call: the last one is a TOKEN."""
        if not self._entries:
            return np.zeros(0, dtypes.LOG_ENTRY)
        entries = np.concatenate(self._entries)
        tokens = np.flatnonzero(entries["kind"] == LogKind.TOKEN)
        whole = int(tokens[-1]) + 1 if tokens.size else 0
        self._entries = [entries[whole:]] if whole < len(entries) else []
        self._unsent -= whole
        return entries[:whole]


def _reject_name(code: int) -> str:
    try:
        return RejectCode(code).name
    except ValueError:
        return f"unknown code {code}"
