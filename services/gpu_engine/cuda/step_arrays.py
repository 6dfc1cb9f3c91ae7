"""The step in device memory: the arrays of docs/architecture.md, "The engine's step", and the result's.

Kernels get addresses: of the control loop's own arrays, or of ``StepArrays``, which the host fills.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.cuda.driver import Buffer
from services.gpu_engine.step import Step
from services.ring.schema import MAX_STOP_TOKENS, MAX_TOP_LOGPROBS

Int32Array = NDArray[np.int32]

MAX_SUPPRESSED = 8 + MAX_STOP_TOKENS  # the model's own end tokens and the request's
ROW_SAMPLING = np.dtype(
    {
        "names": [
            *("seed", "history_offset", "history_length", "prompt_tokens", "temperature", "top_p", "min_p"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty", "top_k", "top_logprobs", "logprobs"),
            *("suppress_count", "suppress"),
        ],
        "formats": ["<u8"] * 2 + ["<u4"] * 2 + ["<f4"] * 6 + ["<u4"] * 4 + [("<u4", MAX_SUPPRESSED)],
        "itemsize": 160,
    }
)
"""RowSampling of services/gpu_engine/core/request.hpp."""


@dataclass(frozen=True)
class StepLimits:
    """The largest step.

    Attributes:
        tokens: of one step.
        rows: sequences of one step, and lines of the page table.
        pages_per_sequence: entries of a line.
    """

    tokens: int
    rows: int
    pages_per_sequence: int


@dataclass(frozen=True)
class StepAddresses:
    """Where the step lies in device memory: the arrays of docs/architecture.md, "The engine's step", and its result.

    ``counts`` is tokens, rows and samples, three uint32. ``memory`` is whatever must live as long as the addresses.
    """

    counts: int
    token_ids: int
    positions: int
    row_start: int
    kv_length: int
    sequence: int
    page_table: int
    sample_row: int
    sampling: int
    history: int
    pages_per_sequence: int
    tokens: int
    logprobs: int
    top_tokens: int
    top_logprobs: int
    memory: object


@dataclass(frozen=True)
class HostStep:
    """A step as NumPy arrays, names and shapes as in docs/architecture.md."""

    token_ids: Int32Array
    positions: Int32Array
    row_start: Int32Array
    kv_length: Int32Array
    sequence: Int32Array
    page_table: Int32Array
    sample_row: Int32Array
    sampling: NDArray[np.void]
    history: NDArray[np.uint32]

    @property
    def tokens(self) -> int:
        return self.token_ids.size

    @property
    def rows(self) -> int:
        return self.kv_length.size

    @property
    def samples(self) -> int:
        return self.sample_row.size


@dataclass(frozen=True)
class StepResult:
    """tokens [samples] int32, logprobs [samples] float32, and [samples, MAX_TOP_LOGPROBS] of each for alternatives."""

    tokens: Int32Array
    logprobs: NDArray[np.float32]
    top_tokens: Int32Array
    top_logprobs: NDArray[np.float32]


_INPUTS = ("counts", "token_ids", "positions", "row_start", "kv_length", "sequence", "page_table", "sample_row")


class CStep(ctypes.Structure):
    """``blink::Step`` of kernels/step.cuh. ``token_row`` is attention's (attention_work.py)."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _INPUTS),
        ("token_row", ctypes.c_uint64),
        ("pages_per_sequence", ctypes.c_uint32),
    )

    @classmethod
    def of(cls, step: StepAddresses, token_row: int = 0) -> CStep:
        return cls(*(getattr(step, name) for name in _INPUTS), token_row, step.pages_per_sequence)


class StepArrays:
    """Device memory for steps up to ``limits`` and for their results, filled from the host.

    Args:
        history_words: of all requests' token histories.
    """

    def __init__(self, limits: StepLimits, history_words: int = 1) -> None:
        self.limits = limits
        self.counts = Buffer(12)
        self.counts.fill(0)  # a launch before the first step does nothing
        self.token_ids = Buffer(4 * limits.tokens)
        self.positions = Buffer(4 * limits.tokens)
        self.row_start = Buffer(4 * (limits.rows + 1))
        self.kv_length = Buffer(4 * limits.rows)
        self.sequence = Buffer(4 * limits.rows)
        self.page_table = Buffer(4 * limits.rows * limits.pages_per_sequence, "the page table")
        self.sample_row = Buffer(4 * limits.rows)
        self.sampling = Buffer(ROW_SAMPLING.itemsize * limits.rows)
        self.history = Buffer(4 * history_words, "the token histories")
        self.tokens = Buffer(4 * limits.rows)
        self.logprobs = Buffer(4 * limits.rows)
        self.top_tokens = Buffer(4 * limits.rows * MAX_TOP_LOGPROBS)
        self.top_logprobs = Buffer(4 * limits.rows * MAX_TOP_LOGPROBS)

    @property
    def addresses(self) -> StepAddresses:
        buffers = {name: value.pointer for name, value in vars(self).items() if isinstance(value, Buffer)}
        return StepAddresses(**buffers, pages_per_sequence=self.limits.pages_per_sequence, memory=self)

    def upload(self, step: Step) -> None:
        """Copy a step to the device.

        Raises:
            ValueError: it is larger than the limits.
        """
        counts = np.array([step.tokens, step.rows, step.samples], np.uint32)
        self.counts.upload(counts)
        for name, dtype in (
            *((name, np.int32) for name in ("token_ids", "positions", "row_start", "kv_length", "sequence")),
            *((name, np.int32) for name in ("page_table", "sample_row")),
            ("sampling", ROW_SAMPLING),
            ("history", np.uint32),
        ):
            array: NDArray[Any] = getattr(step, name)
            if array.dtype != dtype:
                raise ValueError(f"step {name} has dtype {array.dtype}, must be {dtype}")
            getattr(self, name).upload(array)

    def result(self, samples: int) -> StepResult:
        """Wait for the device and copy the first ``samples`` results out."""
        alternatives = (samples, MAX_TOP_LOGPROBS)
        return StepResult(
            self.tokens.download(np.int32, (samples,)),
            self.logprobs.download(np.float32, (samples,)),
            self.top_tokens.download(np.int32, alternatives),
            self.top_logprobs.download(np.float32, alternatives),
        )
