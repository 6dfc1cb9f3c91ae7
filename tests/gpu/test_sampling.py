"""Sampling against NumPy and the cpu engine: the same token for the same logits, parameters, seed and position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Buffer, Stream
from services.gpu_engine.cuda.sampler import Sampler
from services.gpu_engine.cuda.step_arrays import MAX_SUPPRESSED, StepArrays, StepLimits, StepResult
from services.ring.schema import MAX_TOP_LOGPROBS
from tests.gpu import sampling_reference as reference
from tests.gpu.steps import sampling_rows

Floats = NDArray[np.float32]
VOCABULARIES = [512, 32003, 128256]
ROWS, HISTORY = 24, 300


@dataclass(frozen=True)
class Case:
    """Rows to sample: logits [rows, vocabulary], their parameters, and the histories that those point into."""

    logits: Floats
    sampling: NDArray[np.void]
    history: NDArray[np.uint32]


def logits_of_every_kind(rng: np.random.Generator, rows: int, vocabulary: int) -> Floats:
    """Spread as real ones, hardly spread at all, full of ties, partly impossible."""
    logits = rng.standard_normal((rows, vocabulary)).astype(np.float32) * 3
    logits[1::6] *= np.float32(1e-3)
    logits[2::6] = np.round(logits[2::6])
    logits[3::6] = 0
    logits[4::6, rng.random(vocabulary) < 0.5] = -np.inf
    logits[5::6] *= 8
    return logits


def random_case(rng: np.random.Generator, vocabulary: int) -> Case:
    """Every parameter set in some rows and not in others."""

    def some(values: Any, neutral: Any) -> Any:
        return np.where(rng.random(ROWS) < 0.5, values, neutral)

    sampling = sampling_rows(
        ROWS,
        seed=rng.integers(0, 2**64, ROWS, dtype=np.uint64),
        history_offset=np.arange(ROWS) * HISTORY,
        history_length=rng.integers(1, HISTORY, ROWS),
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5], ROWS, p=[0.1, 0.3, 0.3, 0.3]),
        top_p=some(rng.uniform(0.05, 0.999, ROWS), 1.0),
        min_p=some(rng.uniform(0.001, 0.5, ROWS), 0.0),
        top_k=some(rng.integers(1, min(vocabulary, 3000), ROWS), 0),
        repetition_penalty=some(rng.uniform(0.5, 2.0, ROWS), 1.0),
        presence_penalty=some(rng.uniform(-2, 2, ROWS), 0.0),
        frequency_penalty=some(rng.uniform(-2, 2, ROWS), 0.0),
        suppress_count=some(rng.integers(0, MAX_SUPPRESSED, ROWS), 0),
        logprobs=rng.integers(0, 2, ROWS),
        top_logprobs=some(rng.integers(0, MAX_TOP_LOGPROBS + 1, ROWS), 0),
    )
    sampling["prompt_tokens"] = sampling["history_length"] // 2
    sampling["suppress"] = rng.integers(0, vocabulary, (ROWS, MAX_SUPPRESSED))
    history = rng.integers(0, min(vocabulary, 200), ROWS * HISTORY).astype(np.uint32)
    return Case(logits_of_every_kind(rng, ROWS, vocabulary), sampling, history)


class Bench:
    """The sampler of one vocabulary."""

    def __init__(self, compiler: Compiler, stream: Stream, vocabulary: int) -> None:
        self.arrays = StepArrays(StepLimits(64, 64, 1), 64 * HISTORY)
        self.stream, self.vocabulary = stream, vocabulary
        self.sampler = Sampler(vocabulary, compiler, self.arrays.addresses, 64)

    def draw(self, case: Case) -> StepResult:
        rows = len(case.sampling)
        self.arrays.counts.upload(np.array([rows, rows, rows], np.uint32))
        self.arrays.sampling.upload(case.sampling)
        self.arrays.history.upload(case.history)
        for buffer in (self.arrays.tokens, self.arrays.logprobs, self.arrays.top_tokens, self.arrays.top_logprobs):
            buffer.fill(0xFF)
        logits = Buffer.of(case.logits)
        self.sampler.sample(self.stream, 64, logits.pointer)
        result = self.arrays.result(rows)
        np.testing.assert_array_equal(logits.download(np.float32, case.logits.shape), case.logits)
        return result

    def tokens(self, logits: Floats, sampling: NDArray[np.void]) -> NDArray[np.int32]:
        """Of rows that share their logits, drawn 64 at a time."""
        parts = []
        for start in range(0, len(sampling), 64):
            part = sampling[start : start + 64]
            spread = np.ascontiguousarray(np.broadcast_to(logits, (len(part), self.vocabulary)))
            parts.append(self.draw(Case(spread, part, np.zeros(1, np.uint32))).tokens)
        return np.concatenate(parts)


@pytest.fixture(scope="module", params=VOCABULARIES)
def bench(request: pytest.FixtureRequest, compiler: Compiler, stream: Stream) -> Bench:
    return Bench(compiler, stream, request.param)


def history_of(case: Case, row: int) -> NDArray[np.uint32]:
    start = int(case.sampling[row]["history_offset"])
    return case.history[start : start + int(case.sampling[row]["history_length"])]


@pytest.mark.parametrize("_", range(4))
def test_tokens_equal_numpys(bench: Bench, rng: np.random.Generator, _: int) -> None:
    case = random_case(rng, bench.vocabulary)
    found = bench.draw(case).tokens
    expected = [
        reference.choose(case.logits[i], case.sampling[i], history_of(case, i)) for i in range(len(case.sampling))
    ]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("_", range(4))
def test_results_equal_the_cpu_engines(bench: Bench, rng: np.random.Generator, _: int) -> None:
    cpu = pytest.importorskip("services.gpu_engine.cpu._kernels", reason="needs the cpu engine's extension")
    case = random_case(rng, bench.vocabulary)
    rows = len(case.sampling)
    tokens, logprobs = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    top_tokens = np.full((rows, MAX_TOP_LOGPROBS), -1, np.int32)
    top_logprobs = np.full((rows, MAX_TOP_LOGPROBS), np.nan, np.float32)
    sampling = case.sampling.view(np.uint8).reshape(rows, -1)
    cpu.Kernels(1).sample(case.logits, rows, sampling, case.history, tokens, logprobs, top_tokens, top_logprobs)
    found = bench.draw(case)
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_allclose(found.logprobs, logprobs, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found.top_tokens, top_tokens)
    np.testing.assert_allclose(found.top_logprobs, top_logprobs, rtol=1e-6, atol=1e-6)


def test_log_probabilities_and_alternatives(bench: Bench, rng: np.random.Generator) -> None:
    case = random_case(rng, bench.vocabulary)
    found = bench.draw(case)
    for i, row in enumerate(case.sampling):
        count = int(row["top_logprobs"])
        wanted = bool(row["logprobs"] or count)
        true = reference.log_probabilities(case.logits[i])
        order = np.lexsort((np.arange(bench.vocabulary), -case.logits[i]))[:count]
        np.testing.assert_array_equal(found.top_tokens[i, :count], order)
        np.testing.assert_allclose(found.top_logprobs[i, :count], true[order], rtol=2e-6, atol=2e-6)
        assert (found.top_tokens[i, count:] == -1).all()
        expected = true[found.tokens[i]] if wanted else 0.0
        np.testing.assert_allclose(found.logprobs[i], expected, rtol=2e-6, atol=2e-6)


def test_a_row_gets_the_same_bits_alone_and_in_a_batch(bench: Bench, rng: np.random.Generator) -> None:
    case = random_case(rng, bench.vocabulary)
    together = bench.draw(case)
    for i in range(0, ROWS, 5):
        alone = bench.draw(Case(case.logits[i : i + 1], case.sampling[i : i + 1], case.history))
        for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[i])


def test_penalties_leave_no_trace_in_later_rows(bench: Bench, rng: np.random.Generator) -> None:
    case = random_case(rng, bench.vocabulary)
    bench.draw(case)
    assert not bench.sampler.marks.download(np.uint32, (ROWS, bench.vocabulary)).any()


def test_tokens_follow_the_distribution(bench: Bench, rng: np.random.Generator) -> None:
    """Pearson's chi-squared over 16 groups of tokens of equal probability, within six standard deviations."""
    logits = rng.standard_normal(bench.vocabulary).astype(np.float32)
    draws = 64 * 40
    tokens = bench.tokens(logits, sampling_rows(draws, seed=rng.integers(0, 2**63, draws)))
    p = np.exp(logits.astype(np.float64))
    group = np.minimum((np.cumsum(p) / p.sum() * 16).astype(int), 15)
    expected = np.bincount(group, p / p.sum() * draws, 16)
    observed = np.bincount(group[tokens], minlength=16)
    assert ((observed - expected) ** 2 / expected).sum() < 15 + 6 * np.sqrt(2 * 15)
