"""The control loop, with the whole scheduling core in it, compiles and links for Hopper without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

pytest.importorskip("cuda.bindings", reason="needs the CUDA compilers of blink[cuda]")

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.control_loop.build import build_control_loop
from services.gpu_engine.cuda.graph_cache import default_buckets
from services.gpu_engine.cuda.host_loop.loop import SOURCE as HOST_STEP

ENTRIES = (b"control_loop", b"retire_step", b"lay_out_loop", b"audit_loop")


@pytest.mark.parametrize(("threads", "trace"), [(256, False), (512, True)])
def test_the_control_loop_compiles_and_links_the_device_runtime(threads: int, trace: bool) -> None:
    cubin = build_control_loop("sm_90a", None, threads=threads, trace=trace)
    assert all(b".text." + entry + b"\0" in cubin for entry in ENTRIES)
    # Linked for real: what launches graphs from the device is no longer undefined without its library.
    assert b"cudaGraphLaunch" in cubin


@pytest.mark.parametrize("source", ["tests/gpu/stand_in_step.cu", "bench/control_loop_step.cu", HOST_STEP])
def test_steps_without_a_model_compile(source: str) -> None:
    assert b".text." in Compiler("sm_90a").build((source,), {})


@pytest.mark.parametrize("most", [1, 7, 8, 100, 256, 2048, 8192])
def test_buckets_rise_to_the_largest_step_and_waste_an_eighth_at_most(most: int) -> None:
    buckets: Sequence[int] = default_buckets(most)
    assert buckets[0] == 1
    assert buckets[-1] == most
    assert sorted(set(buckets)) == buckets
    for smaller, larger in itertools.pairwise(buckets):
        assert larger - smaller <= max(8, smaller / 8)
