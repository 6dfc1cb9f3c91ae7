"""Memory at start: what does not fit is refused before it is loaded, and what is planned is what is taken."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda engine's libraries are not installed: pip install 'blink[cuda]'")

from services.gpu_engine.cuda.assemble import assemble
from services.gpu_engine.cuda.driver import Buffer, Device
from services.gpu_engine.cuda.errors import OutOfDeviceMemoryError
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.memory_plan import LIBRARY_BYTES, memory_parts
from services.gpu_engine.cuda.step_arrays import StepLimits
from services.gpu_engine.engine import EngineLimits
from services.gpu_engine.models.checkpoint import Progress
from services.gpu_engine.models.family import Layer, TensorSpec, tensors_of
from services.gpu_engine.models.llama import llama
from services.gpu_engine.models.tensors import StoredTensor, TensorType
from services.ring.header import RingInfo, format_ring
from services.ring.memory import Region, allocate_region
from services.ring.schema import RingGeometry
from tests.gpu.steps import config

pytestmark = pytest.mark.usefixtures("device")  # which skips where there is no GPU

LIMITS = EngineLimits(
    context=1024,
    page_size=16,
    kv_pages=20_000,
    max_running=64,
    max_batched_tokens=1024,
    max_waiting=64,
    lease_timeout_ms=10_000,
)
ROUNDING = 64 << 20  # of the driver's, in all


class Zeros:
    """A model whose weights are all 0."""

    def __init__(self) -> None:
        self.config = config(layers=4, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=4096, vocabulary=32_000)
        self.layers: tuple[Layer, ...] = llama(self.config)

    def kv_scales(self, layer: int) -> tuple[float, float]:
        del layer
        return 1.0, 1.0

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[TensorSpec, StoredTensor]]:
        for spec in tensors_of(self.layers):
            rows, columns = (1, *spec.shape)[-2:]
            yield spec, StoredTensor(spec.shape, TensorType.BF16, np.zeros((rows, 2 * columns), np.uint8))


def ring(limits: EngineLimits, vocabulary: int) -> Region:
    geometry = RingGeometry(lanes=1, slots_per_lane=8, arena_bytes=1 << 16, log_entries=256)
    region = allocate_region(geometry.ring_bytes)
    format_ring(region, RingInfo(geometry, bytes(32), vocabulary, limits.context))
    return region


def test_too_many_pages_are_refused_before_anything_is_loaded() -> None:
    model, stages = Zeros(), set()
    limits = replace(LIMITS, kv_pages=1 << 24)
    region = ring(limits, model.config.vocabulary)
    with pytest.raises(OutOfDeviceMemoryError, match=r"KV cache [\d,]+.* lower kv_tokens to \d+"):
        assemble(model, region, limits, epoch=1, progress=lambda stage, *_: stages.add(stage))
    assert not stages


def test_an_allocation_that_fails_says_for_what_and_how_much() -> None:
    with pytest.raises(OutOfDeviceMemoryError, match=r"a giant needs 1,073,741,824 MiB .* lower kv_tokens") as caught:
        Buffer(1 << 50, "a giant")
    assert caught.value.needed == 1 << 50


def test_the_plan_covers_what_a_start_takes_and_little_more(device: Device) -> None:
    model = Zeros()
    region = ring(LIMITS, model.config.vocabulary)
    step_limits = StepLimits(LIMITS.max_batched_tokens, LIMITS.max_running, LIMITS.context // LIMITS.page_size)
    planned = sum(memory_parts(model.layers, Geometry(model.config), step_limits, LIMITS.kv_pages).values())
    gc.collect()  # what earlier tests have left
    free = device.free_bytes()
    engine = assemble(model, region, LIMITS, epoch=time.time_ns(), progress=lambda *_: None)
    taken = free - device.free_bytes()
    del engine
    print(f"planned {planned:,} bytes, taken {taken:,}")
    assert planned - LIBRARY_BYTES - ROUNDING <= taken <= planned
