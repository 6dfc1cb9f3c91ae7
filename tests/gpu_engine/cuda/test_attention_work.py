"""How attention's keys are divided, and the memory that takes."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")

from services.gpu_engine.cuda import attention_work
from services.gpu_engine.cuda.attention_work import AttentionWork
from services.gpu_engine.cuda.compiler import KERNELS
from services.gpu_engine.cuda.driver import measuring
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.step_arrays import StepLimits
from tests.gpu.steps import config

GEOMETRY = Geometry(config(heads=32, kv_heads=8, head_dim=128))


def work(context: int) -> AttentionWork:
    with measuring():
        return AttentionWork(GEOMETRY, StepLimits(2048, 256, context // GEOMETRY.page_size))


@pytest.mark.parametrize("name", ["TILE_ROWS", "BLOCK_KEYS", "MIN_SPLIT", "MAX_SPLITS"])
def test_the_kernels_constants_are_the_same(name: str) -> None:
    constant = "k" + name.title().replace("_", "")
    found = re.search(rf"\b{constant} = (\d+)", (KERNELS / "attention_work.cuh").read_text())
    assert found is not None
    assert int(found[1]) == getattr(attention_work, name)


@pytest.mark.parametrize("context", [16, 2048, 4096])
def test_a_short_context_is_one_segment_and_needs_no_memory_for_more(context: int) -> None:
    made = work(context)
    assert (made.segments, made.slots, made.segment_out.nbytes) == (1, 0, 0)


@pytest.mark.parametrize(
    ("context", "keys", "segments"),
    [(4112, 4096, 2), (8192, 4096, 2), (32768, 4096, 8), (32784, 4224, 8), (131072, 16384, 8), (1 << 20, 1 << 17, 8)],
)
def test_longer_contexts_have_more_segments_and_then_longer_ones(context: int, keys: int, segments: int) -> None:
    made = work(context)
    assert (made.segment_blocks * 128, made.segments) == (keys, segments)


def test_segments_of_the_longest_context_of_llama_3_take_a_few_hundred_mib() -> None:
    made = work(131072)
    kept = made.segment_out.nbytes + made.segment_ml.nbytes
    assert kept == (8 * 32 * 8 + 144 * 8) * 128 * (4 * 128 + 32)
    assert kept < 256 << 20
