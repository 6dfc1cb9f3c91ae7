"""What every engine is to the process that starts it."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from services.common.errors import BlinkError
from services.ring.parts import RingParts
from services.ring.transport import Transport

Precision = Literal["bf16", "fp8"]
"""Of weights, or of the KV cache: fp8 is e4m3 with scales."""


class EngineError(BlinkError):
    """An engine can't be started as asked, or has failed."""


class SchedulerSettings(TypedDict):
    """What every engine tells the scheduling core (SchedulerConfig of core/_core.pyi)."""

    page_size: int
    page_count: int
    max_running: int
    max_batched_tokens: int
    max_waiting: int
    priority_boost: int
    lease_us: int
    prefix_cache: bool
    share_decoded: bool
    cache_seed: int
    eos_token_ids: Sequence[int]


@dataclass(frozen=True)
class EngineLimits:
    """How large an engine is. Everything is allocated from these numbers at its start; nothing grows later.

    Attributes:
        context: tokens of the longest request, prompt and output together.
        page_size: tokens of a KV page.
        kv_pages: of the whole KV cache.
        max_running: sequences that may hold KV pages, and rows of a step.
        max_batched_tokens: tokens of one step, decode rows and prompt chunks together.
        max_waiting: queued requests; one more ends with QUEUE_FULL.
        lease_timeout_ms: a lane whose gateway is silent for longer is reclaimed.
        priority_boost: requests of its own lane that one level of priority lets a request overtake.
        prefix_cache: whether KV pages are kept after their requests and found by requests that begin alike.
        share_decoded: whether pages of generated tokens are, though the engine may compute them with other last bits
            than a prompt's.
    """

    context: int
    page_size: int
    kv_pages: int
    max_running: int
    max_batched_tokens: int
    max_waiting: int
    lease_timeout_ms: int
    priority_boost: int = 32
    prefix_cache: bool = False
    share_decoded: bool = False

    def scheduler_settings(self, eos_token_ids: Sequence[int], *, decodes_exactly: bool) -> SchedulerSettings:
        """``decodes_exactly`` is the engine's word that a token's keys and values have the same bits whether they were
        computed alone or in a longer chunk."""
        return {
            "page_size": self.page_size,
            "page_count": self.kv_pages,
            "max_running": self.max_running,
            "max_batched_tokens": self.max_batched_tokens,
            "max_waiting": self.max_waiting,
            "priority_boost": self.priority_boost,
            "lease_us": self.lease_timeout_ms * 1000,
            "prefix_cache": self.prefix_cache,
            "share_decoded": self.share_decoded or decodes_exactly,
            "cache_seed": secrets.randbits(64),
            "eos_token_ids": eos_token_ids,
        }

    def check(self) -> None:
        """Refuse sizes with which the longest request could never run.

        Raises:
            EngineError: naming the numbers and what to change.
        """
        held = self.kv_pages * self.page_size
        if held < self.context:
            raise EngineError(
                f"the KV cache holds {held} tokens ({self.kv_pages} pages of {self.page_size}), one sequence needs"
                f" {self.context}: give it more memory or lower max_context_tokens"
            )


@dataclass(frozen=True)
class MovedRing:
    """A ring that the engine keeps elsewhere than in the region that it was given."""

    transport: Transport  # bootstrap's way to its header, from any thread
    parts: RingParts  # where NICs find it


class Engine(ABC):
    """An engine that holds its weights and its ring. Its constructor loads and allocates; READY comes with ``run``.

    ``ring`` is None while the ring is in the region that the engine was given.
    """

    ring: MovedRing | None = None

    @abstractmethod
    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """The control loop, on the caller's thread: READY, then ``on_ready``, then steps.

        Returns once bootstrap's order is STOP and every request has ended. Whatever goes wrong, the ring's state is
        FAILED before the exception leaves this call, so no gateway waits for an engine that is gone.
        """
