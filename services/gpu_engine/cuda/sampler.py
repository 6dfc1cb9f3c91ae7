"""Sampling on the device: kernels/sampling.cu with its scratch memory."""

from __future__ import annotations

import ctypes

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Module, Stream, pointer
from services.gpu_engine.cuda.step_arrays import CStep, StepAddresses

SAMPLE_BLOCK = 1024


class CSampleResult(ctypes.Structure):
    """``blink::SampleResult``."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"))


def marks_bytes(vocabulary: int, rows: int) -> int:
    """Of the scratch memory that penalties need."""
    return 4 * rows * vocabulary


class Sampler:
    """Samples up to ``rows`` rows of ``step``, and writes its results there."""

    def __init__(self, vocabulary: int, compiler: Compiler, step: StepAddresses, rows: int) -> None:
        module = Module(compiler.build(("sampling.cu",), {"BLINK_VOCABULARY": vocabulary}))
        self._sample = module.kernel("sample", waits=True)
        self.marks = Buffer(marks_bytes(vocabulary, rows), "scratch memory of penalties")
        self.marks.fill(0)
        self._memory = step.memory  # the launches hold addresses alone
        self._step = CStep.of(step)
        self._inputs = pointer(step.sampling), pointer(step.history)
        self._result = CSampleResult(step.tokens, step.logprobs, step.top_tokens, step.top_logprobs)

    def sample(self, stream: Stream, samples: int, logits: int) -> None:
        """Launch for at most ``samples`` rows of float32 logits [samples, vocabulary]."""
        arguments = (self._step, *self._inputs, pointer(logits), pointer(self.marks), self._result)
        self._sample.launch(stream, (samples, 1, 1), SAMPLE_BLOCK, arguments)
