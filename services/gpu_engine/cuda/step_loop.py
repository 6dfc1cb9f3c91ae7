"""What the two control loops share: settings, step graphs, a start that waits for READY, a wait for the end.

``control_loop`` schedules on the GPU, ``host_loop`` on a host thread. Both run the same scheduling core and launch
the same kernels over ``step``.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cuda.bindings import driver as cu

from services.gpu_engine.cuda.control_loop.errors import ControlLoopError
from services.gpu_engine.cuda.driver import Device, Stream
from services.gpu_engine.cuda.errors import DriverError
from services.gpu_engine.cuda.graph_cache import DecodeSteps, GraphCache, Progress, Record
from services.gpu_engine.cuda.step_arrays import StepAddresses
from services.gpu_engine.engine import SchedulerSettings

MAX_LAUNCHES = 120  # kMaxLaunches of loop.cuh
MAX_EOS_TOKENS = 8
_START_SECONDS = 30.0


@dataclass(frozen=True)
class LoopConfig:
    """How a loop schedules. The first eleven are the scheduling core's (SchedulerConfig of _core.pyi).

    Attributes:
        poll_us: between two polls of the ring while a step runs, or while there is nothing to run; of the GPU's loop,
            as the two below.
        idle_sleep_ns: between two looks at the doorbells while there is nothing to run.
        launch_limit: steps of one execution of the loop, before it launches itself anew.
    """

    page_size: int
    page_count: int
    max_running: int
    max_batched_tokens: int
    max_waiting: int = 1024
    priority_boost: int = 32
    lease_us: int = 5_000_000
    prefix_cache: bool = False
    share_decoded: bool = False
    cache_seed: int = 0
    eos_token_ids: Sequence[int] = ()
    first_position: int = 0
    poll_us: int = 1000
    idle_sleep_ns: int = 500
    launch_limit: int = MAX_LAUNCHES

    def check(self) -> None:
        """Raises ValueError naming the field, its value and its limits."""
        limits = {
            "page_size": (self.page_size, 1, 1 << 16),
            "page_count": (self.page_count, 1, 1 << 30),
            "max_running": (self.max_running, 1, 1 << 16),
            "max_batched_tokens": (self.max_batched_tokens, 1, 1 << 24),
            "max_waiting": (self.max_waiting, 1, 1 << 31),
            "priority_boost": (self.priority_boost, 0, 1 << 20),
            "lease_us": (self.lease_us, 1, 1 << 60),
            "cache_seed": (self.cache_seed, 0, (1 << 64) - 1),
            "number of eos_token_ids": (len(self.eos_token_ids), 0, MAX_EOS_TOKENS),
            "poll_us": (self.poll_us, 1, 100_000),
            "idle_sleep_ns": (self.idle_sleep_ns, 0, 1_000_000),
            "launch_limit": (self.launch_limit, 1, MAX_LAUNCHES),
        }
        for name, (value, low, high) in limits.items():
            _require(name, value, low, high)

    def scheduler_settings(self) -> SchedulerSettings:
        """The part that the scheduling core takes."""
        return {
            "page_size": self.page_size,
            "page_count": self.page_count,
            "max_running": self.max_running,
            "max_batched_tokens": self.max_batched_tokens,
            "max_waiting": self.max_waiting,
            "priority_boost": self.priority_boost,
            "lease_us": self.lease_us,
            "prefix_cache": self.prefix_cache,
            "share_decoded": self.share_decoded,
            "cache_seed": self.cache_seed,
            "eos_token_ids": self.eos_token_ids,
        }


@dataclass(frozen=True)
class CoreAudit:
    """What the scheduling core holds on to (audit.hpp)."""

    live_requests: int
    free_pages: int
    free_lines: int
    held_arena_lines: int
    promised_log_entries: int


class StepLoop(ABC):
    """A control loop: everything that it needs, then the loop.

    The order is: make it, ``capture`` the step graphs with kernels that read ``step``, ``start`` it, ``wait`` for its
    end. All from one thread.

    Args:
        epoch: of this start of the engine, not 0.

    Attributes:
        step: addresses for the step's kernels.
        graphs: once captured.
    """

    step: StepAddresses

    def __init__(self, device: Device, config: LoopConfig, epoch: int) -> None:
        config.check()
        _require("epoch", epoch, 1, (1 << 64) - 1)
        self.config = config
        self.graphs: GraphCache | None = None
        self._device = device
        self._stream = Stream()

    def capture(
        self,
        record: Record,
        buckets: Sequence[int],
        progress: Progress = lambda _done, _total: None,
        decode: DecodeSteps | None = None,
    ) -> GraphCache:
        """Make the step graphs. ``record`` launches a step of at most so many tokens over ``step``."""
        if not buckets or buckets[-1] < self.config.max_batched_tokens:
            most = self.config.max_batched_tokens
            raise ValueError(f"buckets end at {list(buckets)[-1:]}, must hold max_batched_tokens, which is {most}")
        self.graphs = self._capture(record, buckets, progress, decode)
        return self.graphs

    def start(self, engine_state: Callable[[], int], ready: int) -> None:
        """Start the loop; returns when ``engine_state()``, a look into the ring, is ``ready``.

        Raises:
            ControlLoopError: it ended, or did not get there in time.
        """
        if self.graphs is None:
            raise ValueError("start: the step graphs are not captured")
        launch = self._prepare(self.graphs)
        gc.collect()  # freeing device memory waits for the device, so not one forgotten buffer may be left to free
        self._device.synchronize()
        launch()
        deadline = time.monotonic() + _START_SECONDS
        while engine_state() != ready:
            if self.ended:
                self.wait()
                raise ControlLoopError(0, "the control loop ended before it was ready")
            if time.monotonic() > deadline:
                raise ControlLoopError(0, f"the control loop was not ready within {_START_SECONDS:.0f} s")
            time.sleep(0.0005)

    @abstractmethod
    def wait(self) -> None:
        """Sleep until the loop has ended by STOP.

        Raises:
            ControlLoopError: it ended for another reason.
        """

    @abstractmethod
    def audit(self) -> CoreAudit:
        """Only after the loop's end."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether ``wait`` would return at once."""

    @abstractmethod
    def _capture(
        self, record: Record, buckets: Sequence[int], progress: Progress, decode: DecodeSteps | None
    ) -> GraphCache:
        """The step graphs, with what this loop needs before and after ``record``."""

    @abstractmethod
    def _prepare(self, graphs: GraphCache) -> Callable[[], None]:
        """All that can be done before the start; returns what starts the loop, and itself returns at once."""


def gpu_failed(error: DriverError) -> ControlLoopError:
    """What ends the engine when the GPU no longer answers."""
    code = int(getattr(cu.CUresult, error.name))
    return ControlLoopError(code, f"the GPU failed while serving: {error}")


def _require(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, must be {low} to {high}")
