from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

ROW_SAMPLING: np.dtype[np.void]
"""One row's sampling: seed, history_offset (u64); history_length, prompt_tokens, top_k, top_logprobs, logprobs,
suppress_count, suppress[24] (u32); temperature, top_p, min_p, repetition_penalty, presence_penalty,
frequency_penalty (f32).

The row's prompt and output tokens are ``history[history_offset:][:history_length]``, the prompt's the first
``prompt_tokens`` of them. The token to be sampled has position ``history_length``. ``suppress[:suppress_count]`` must
not be sampled. ``logprobs`` is 1 when the token's log-probability is wanted, ``top_logprobs`` counts the
alternatives that are."""

MAX_EOS_TOKENS: int

class SchedulerConfig:
    """Limits of the scheduling core. Raises ValueError naming the field, its value and its limits."""

    def __init__(
        self,
        *,
        page_size: int,
        page_count: int,
        max_running: int,
        max_batched_tokens: int,
        max_waiting: int = 1024,
        priority_boost: int = 32,
        lease_us: int = 5_000_000,
        prefix_cache: bool = False,
        share_decoded: bool = False,
        cache_seed: int = 0,
        eos_token_ids: Sequence[int] = (),
    ) -> None: ...
    @property
    def page_size(self) -> int:
        """Tokens of a KV page."""
    @property
    def page_count(self) -> int: ...
    @property
    def max_running(self) -> int:
        """Lines of the page table: sequences that may hold KV pages, and rows of a step."""
    @property
    def max_batched_tokens(self) -> int:
        """Tokens of one step."""
    @property
    def max_waiting(self) -> int:
        """A submission that finds so many waiting ends with QUEUE_FULL, once its lane has its equal share of them."""
    @property
    def priority_boost(self) -> int:
        """Rounds of its lane that one level of priority lets a request skip."""
    @property
    def lease_us(self) -> int:
        """A lane whose lease was not renewed for longer is reclaimed."""
    @property
    def prefix_cache(self) -> bool:
        """Whether pages are kept after their requests and found by requests that begin alike."""
    @property
    def share_decoded(self) -> bool:
        """Whether pages with tokens that rows of one token computed, and those after them, are found as well."""
    @property
    def eos_token_ids(self) -> list[int]: ...

class Step:
    """The step that ``Scheduler.plan`` filled in: views of the scheduler's memory, valid until ``commit``.

    Shapes and meanings are in docs/architecture.md, "The engine's step". All are int32 unless said otherwise.
    """

    @property
    def tokens(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def token_ids(self) -> Int32Array:
        """[tokens]"""
    @property
    def positions(self) -> Int32Array:
        """[tokens]"""
    @property
    def row_start(self) -> Int32Array:
        """[rows + 1]"""
    @property
    def kv_length(self) -> Int32Array:
        """[rows]"""
    @property
    def sequence(self) -> Int32Array:
        """[rows]"""
    @property
    def page_table(self) -> Int32Array:
        """[max_running, pages_per_sequence]; a line's entries beyond its sequence's pages mean nothing."""
    @property
    def sample_row(self) -> Int32Array:
        """[samples]"""
    @property
    def sampling(self) -> npt.NDArray[np.void]:
        """[samples] of ROW_SAMPLING"""
    @property
    def request(self) -> npt.NDArray[np.uint32]:
        """[rows] uint32: lane * slots_per_lane + slot"""
    @property
    def history(self) -> npt.NDArray[np.uint32]:
        """[lanes * arena words] uint32"""

class Scheduler:
    """The scheduling core on the host.

    ``poll`` may be called at any time, also between ``plan`` and ``commit``; these two alternate. Calls must not
    overlap in time, except that ``heartbeat`` is for the thread that makes the other calls as well. All but
    ``heartbeat``, ``start`` and ``set_state`` release the GIL. Times are microseconds of one monotonic clock.
    """

    def __init__(
        self,
        ring: npt.NDArray[np.uint8],
        config: SchedulerConfig,
        *,
        first_position: int = 0,
        threads: int = 1,
        outbound: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """``ring`` holds a RingInfo written by bootstrap. ``first_position`` is every lane's first doorbell position.

        ``outbound`` is the memory of all lanes' outbound areas, when it is not the ring's own.
        ``threads`` above 1 runs the core as a block of that many threads, as a GPU would: for tests.
        Raises ValueError when the header is not a ring of this layout, or a limit is broken.
        """
    def start(self, epoch: int) -> None:
        """Drop everything, reset the engine's part of the ring, and open it under ``epoch`` in state BOOTING."""
    def poll(self, now_us: int) -> None:
        """Read orders, leases, cancels and submissions; end what must end and takes no part in the running step."""
    def plan(self, now_us: int) -> bool:
        """Admit, preempt and fill ``step``. False when nothing can run. Raises RuntimeError before ``commit``."""
    def commit(
        self,
        now_us: int,
        tokens: Int32Array,
        logprobs: Float32Array,
        top_tokens: Int32Array | None = None,
        top_logprobs: Float32Array | None = None,
    ) -> None:
        """Take the step's result and publish it.

        Args:
            tokens: [samples], each below the vocabulary's size.
            logprobs: [samples] float32.
            top_tokens, top_logprobs: [samples, MAX_TOP_LOGPROBS]; may be None when no row wants alternatives.

        Raises:
            ValueError: a shape or a token is wrong; the step is still there.
            RuntimeError: no step was planned.
        """
    def heartbeat(self) -> None:
        """Show that the control loop lives. Costs one store: call it between the layers of a step."""
    def set_state(self, state: int) -> None:
        """Publish an EngineState. READY turns to DRAINING by itself once bootstrap asks to drain or stop."""
    @property
    def step(self) -> Step: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def idle(self) -> bool:
        """No request is live."""
    @property
    def command(self) -> int:
        """schema.Command as last polled."""
    @property
    def drained(self) -> bool:
        """Bootstrap asked to drain or stop, and no request is live."""
    @property
    def free_pages(self) -> int:
        """Pages that a request could take, idle ones of the prefix cache among them."""
    @property
    def idle_pages(self) -> int:
        """Cached pages that no running request has."""
    @property
    def free_lines(self) -> int: ...
    @property
    def held_arena_lines(self) -> int:
        """Arena lines of live requests, all lanes together."""
    @property
    def promised_log_entries(self) -> int:
        """Log entries kept back for ADMITTED and FINISH of live requests, all lanes together."""
    def page_owners(self) -> list[int]:
        """[page_count]: -1 for a free or idle page, lane * slots_per_lane + slot of its owner or of one that shares it;
        -2 if it is lost, held twice though not cached, or its references are miscounted."""
    def cached_prefixes(self) -> list[tuple[int, list[int]]]:
        """Each cached page, with all tokens from its sequence's first to its own last."""
    @property
    def prefix_searches(self) -> int:
        """How often the prefix cache was asked for a waiting request's prompt."""
    def set_prefix_key_mask(self, mask: int) -> None:
        """For tests, after ``start``: few bits make different tokens have the same key in the prefix cache."""
    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """[bytes], whole pages: all that the core owns, the step's arrays too. For who pins it; not to be written."""
    @property
    def call_ns(self) -> int:
        """Time that the last start, poll, plan or commit took, without the binding."""
