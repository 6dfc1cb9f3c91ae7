"""From settings and a checkpoint to an engine: the one place that knows which engines exist."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from services.bootstrap.errors import BootstrapError
from services.bootstrap.memory import available_bytes, require_memory
from services.bootstrap.settings import BootstrapSettings
from services.common.errors import BlinkError
from services.gpu_engine.cpu.engine import CpuEngine
from services.gpu_engine.engine import Engine, EngineLimits
from services.gpu_engine.models.checkpoint import Checkpoint
from services.ring.header import RingInfo
from services.ring.memory import Region

Progress = Callable[[str, int, int], None]  # stage, done, total

FLOAT_BYTES = 4


class EngineBuilder(Protocol):
    """Makes an engine that is ready to run; a test may have another one than ``build_engine``."""

    def __call__(
        self,
        settings: BootstrapSettings,
        checkpoint: Checkpoint,
        info: RingInfo,
        *,
        epoch: int,
        region: Region,
        progress: Progress,
    ) -> Engine: ...


def require_engine(settings: BootstrapSettings) -> None:
    """Refuse at once an engine that this machine can't run. Raises BootstrapError."""
    if settings.engine == "cuda":
        try:
            from services.gpu_engine.cuda.driver import Device  # noqa: PLC0415 (an optional extra)

            Device()
        except BlinkError as error:
            raise BootstrapError(f"engine is 'cuda', but {error}; without a GPU use --engine cpu") from error


def build_engine(
    settings: BootstrapSettings,
    checkpoint: Checkpoint,
    info: RingInfo,
    *,
    epoch: int,
    region: Region,
    progress: Progress,
) -> Engine:
    """Load weights and allocate everything. Raises BlinkError."""
    limits = EngineLimits(
        context=info.max_context_tokens,
        page_size=settings.page_size,
        kv_pages=-(-settings.kv_tokens // settings.page_size),
        max_running=settings.max_running,
        max_batched_tokens=settings.max_batched_tokens,
        max_waiting=settings.max_waiting,
        lease_timeout_ms=settings.lease_timeout_ms,
        priority_boost=settings.priority_boost,
        prefix_cache=settings.prefix_cache != "off",
        share_decoded=settings.prefix_cache == "all",
    )
    if settings.engine == "cuda":
        from services.gpu_engine.cuda.assemble import assemble  # noqa: PLC0415 (an optional extra)

        return assemble(
            checkpoint,
            region,
            limits,
            epoch=epoch,
            progress=progress,
            scheduler=settings.scheduler,
            ring_place=settings.ring_memory,
            kv_cache=settings.kv_cache,
            stored_fp8=checkpoint.fp8_names(),
        )
    require_memory(memory_parts(checkpoint, limits, info), available_bytes())
    return CpuEngine(
        checkpoint,
        region,
        limits,
        epoch=epoch,
        threads=settings.engine_threads,
        progress=partial(progress, "loading weights"),
        kv_cache=settings.kv_cache,
    )


def memory_parts(checkpoint: Checkpoint, limits: EngineLimits, info: RingInfo) -> dict[str, int]:
    """Bytes that the cpu engine allocates, by what they are for; the ring itself is allocated before.

    Token histories live in a private copy of every lane's arena (docs/decisions/0001-record-in-the-arena.md).
    """
    config = checkpoint.config
    positions = limits.kv_pages * limits.page_size
    return {
        "weights": checkpoint.stored_bytes(),
        "KV cache": 2 * FLOAT_BYTES * config.layers * config.kv_width * positions,
        "token histories": info.geometry.lanes * info.geometry.arena_bytes,
    }
