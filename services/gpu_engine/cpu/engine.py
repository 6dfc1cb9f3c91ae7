"""The cpu engine: the scheduling core, the forward pass and the sampler, driven by one control loop."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.common.logging import get_logger
from services.gpu_engine.core._core import Scheduler, SchedulerConfig
from services.gpu_engine.cpu._kernels import Kernels
from services.gpu_engine.cpu.forward import Forward
from services.gpu_engine.cpu.kv_cache import KvCache
from services.gpu_engine.cpu.sampler import Sampler
from services.gpu_engine.cpu.weights import Weights
from services.gpu_engine.engine import Engine, EngineError, EngineLimits, Precision
from services.gpu_engine.models.checkpoint import Checkpoint, Progress
from services.ring.memory import Region
from services.ring.schema import Command, EngineState

LANES = 16  # page_size and head_dim must come in whole vectors

# Between two looks at an idle ring: seconds, and how many looks until the next. A look wakes the process, some 10 to
# 30 µs of CPU, so they grow rare; the last adds 0.9 ms to a request on average. Clients often ask again at once.
IDLE_LOOKS = ((50e-6, 100), (800e-6, 1_200), (1.8e-3, None))

log = get_logger(component="cpu_engine")


class CpuEngine(Engine):
    """Runs a checkpoint on CPU threads in float32, with the weights in the types in which they are stored.

    Args:
        region: a formatted ring.
        epoch: of this start; differs for every start.
        threads: of the forward pass, the control loop's included.
        kv_cache: what keys and values are rounded to; "bf16" leaves them as they are, in float32.
        progress: hears of the weights' loading.
        instruction_set: of the kernels; empty for the CPU's best.

    Raises:
        EngineError: limits that the engine can't work with.
        CheckpointError: weights that it can't execute.
        ValueError: the region is not a ring of this build.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        region: Region,
        limits: EngineLimits,
        *,
        epoch: int,
        threads: int,
        progress: Progress | None = None,
        instruction_set: str = "",
        kv_cache: Precision = "bf16",
    ) -> None:
        config = checkpoint.config
        limits.check()
        for name, value in (("page_size", limits.page_size), ("the model's head_dim", config.head_dim)):
            if value % LANES:
                raise EngineError(f"{name} is {value}, the cpu engine needs a multiple of {LANES}")
        settings = limits.scheduler_settings(config.eos_ids, decodes_exactly=True)
        self._scheduler = Scheduler(region, SchedulerConfig(**settings))
        self._scheduler.start(epoch)  # BOOTING: gateways see at once that an older engine is gone
        weights = Weights(checkpoint, progress)
        kernels = Kernels(threads, instruction_set)
        cache = KvCache(config, limits.kv_pages, limits.page_size)
        self._forward = Forward(
            config,
            weights,
            kernels,
            cache,
            max_tokens=limits.max_batched_tokens,
            max_samples=limits.max_running,
            context=limits.context,
            fp8_kv=[checkpoint.kv_scales(layer) for layer in range(config.layers)] if kv_cache == "fp8" else None,
        )
        self._sampler = Sampler(kernels, limits.max_running)
        log.info(
            "loaded",
            weight_bytes=weights.bytes,
            kv_bytes=cache.bytes,
            kv_pages=limits.kv_pages,
            threads=threads,
            instruction_set=kernels.instruction_set,
        )

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        try:
            self._scheduler.set_state(EngineState.READY)
            on_ready()
            self._loop()
        except BaseException:
            self._scheduler.set_state(EngineState.FAILED)
            log.exception("engine_failed")
            raise

    def _loop(self) -> None:
        scheduler = self._scheduler
        looks = 0
        while True:
            scheduler.poll(_now_us())
            if not scheduler.idle and scheduler.plan(_now_us()):
                self._step()
                looks = 0
                continue
            if scheduler.command == Command.STOP and scheduler.drained:
                return
            scheduler.heartbeat()
            time.sleep(_idle_seconds(looks))
            looks += 1

    def _step(self) -> None:
        step = self._scheduler.step
        logits = self._forward.run(step, self._scheduler.heartbeat)
        tokens, logprobs, top_tokens, top_logprobs = self._sampler.run(logits, step)
        self._scheduler.commit(_now_us(), tokens, logprobs, top_tokens, top_logprobs)


def _idle_seconds(looks: int) -> float:
    """How long to sleep after so many looks in vain."""
    for seconds, count in IDLE_LOOKS:
        if count is None or looks < count:
            return seconds
        looks -= count
    raise AssertionError("the last entry has no count")


def _now_us() -> int:
    return time.monotonic_ns() // 1000
