"""Sampled tokens of one step."""

from __future__ import annotations

import numpy as np

from services.gpu_engine.cpu._kernels import Kernels
from services.gpu_engine.cpu.weights import Floats
from services.gpu_engine.step import Ints, Step
from services.ring.schema import MAX_TOP_LOGPROBS


class Sampler:
    """Chooses tokens by each row's ``RowSampling``; the order of operations is in sampling.hpp. Buffers are reused."""

    def __init__(self, kernels: Kernels, max_samples: int) -> None:
        self._kernels = kernels
        self._tokens = np.zeros(max_samples, np.int32)
        self._logprobs = np.zeros(max_samples, np.float32)
        self._top_tokens = np.zeros((max_samples, MAX_TOP_LOGPROBS), np.int32)
        self._top_logprobs = np.zeros((max_samples, MAX_TOP_LOGPROBS), np.float32)

    def run(self, logits: Floats, step: Step) -> tuple[Ints, Floats, Ints, Floats]:
        """Sample the step's rows.

        Returns:
            tokens, logprobs [samples], top_tokens, top_logprobs [samples, MAX_TOP_LOGPROBS], as ``commit`` takes them;
            valid until the next call. A row's first ``top_logprobs`` alternatives are set.
        """
        samples = step.samples
        sampling = step.sampling
        self._kernels.sample(
            logits,
            samples,
            sampling.view(np.uint8).reshape(samples, sampling.itemsize),
            step.history,
            self._tokens,
            self._logprobs,
            self._top_tokens,
            self._top_logprobs,
        )
        return (
            self._tokens[:samples],
            self._logprobs[:samples],
            self._top_tokens[:samples],
            self._top_logprobs[:samples],
        )
