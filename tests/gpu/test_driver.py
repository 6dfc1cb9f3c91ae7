"""Captures, and what happens on their thread meanwhile."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")
from cuda.bindings import driver as cu

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Device, Module, Stream, Timer, carve_out, check, pointer


class Cycle:
    """Garbage that only Python's collector finds."""

    def __init__(self, *objects: Any) -> None:
        self.objects, self.myself = objects, self


def test_objects_that_die_while_a_stream_is_captured_do_not_end_the_capture(device: Device, compiler: Compiler) -> None:
    """A graph is destroyed when its name is bound to the next one, which is after that one's capture has begun."""
    stream = Stream()
    module = Module(compiler.build(("hold.cu",), {}))
    opened = Buffer.of(np.ones(1, np.uint32))
    kernel = module.kernel("hold")

    def launch() -> None:
        kernel.launch(stream, (1, 1, 1), 1, (pointer(opened), ctypes.c_uint64(0)))

    for _ in range(4):
        doomed = Cycle(Buffer(1 << 24), Stream(), Timer(stream), Module(compiler.build(("hold.cu",), {})))
        with stream.capture() as graphs:
            for _ in range(50):
                launch()
            del doomed
            gc.collect()
            launch()
        graphs[0].launch(stream)
        stream.synchronize()


def test_names_choose_which_kernels_overlap(device: Device) -> None:
    assert not Stream().overlaps("rotary")
    assert Stream(overlap=True).overlaps("rotary")
    some = Stream(overlap={"rotary", "attention"})
    assert some.overlaps("rotary")
    assert not some.overlaps("swiglu")
    with some.overlapping():
        assert some.overlaps("swiglu")
    assert not some.overlaps("swiglu")


def test_kernels_looked_up_inside_prefer_shared_memory(device: Device, compiler: Compiler) -> None:
    cubin = compiler.build(("hold.cu",), {})

    def preferred() -> int:
        module = Module(cubin)
        module.kernel("hold")
        function = check("cuModuleGetFunction", cu.cuModuleGetFunction(module._module, b"hold"))
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        return int(check("cuFuncGetAttribute", cu.cuFuncGetAttribute(attribute, function)))

    before = preferred()
    with carve_out(100):
        assert preferred() == 100
    assert preferred() == before != 100


def test_what_is_uploaded_is_there_for_a_stream_that_waits_for_nothing(device: Device) -> None:
    """The driver returns from small copies before they have arrived."""
    stream, source, target = Stream(), Buffer(60_000), Buffer(60_000)
    for round_ in range(2000):
        expected = np.full(60_000, round_ % 251, np.uint8)
        source.upload(expected)
        check("cuMemcpyAsync", cu.cuMemcpyAsync(target.pointer, source.pointer, source.nbytes, stream.handle))
        stream.synchronize()
        np.testing.assert_array_equal(target.download(np.uint8, (target.nbytes,)), expected)
