"""Sampling: each parameter's meaning, the distribution against float64, and reproducibility."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.gpu_engine.core._core import ROW_SAMPLING
from services.gpu_engine.cpu._kernels import Kernels, philox
from services.ring.schema import MAX_TOP_LOGPROBS
from tests.gpu_engine.cpu.test_linear import instruction_sets

Doubles = NDArray[np.float64]


def rows(count: int, **values: Any) -> NDArray[np.void]:
    """RowSampling with neutral values, changed by ``values`` (scalars or one for each row)."""
    sampling = np.zeros(count, ROW_SAMPLING)
    neutral = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "history_length": 1}
    for name, value in (neutral | values).items():
        sampling[name] = value
    return sampling


def draw(
    logits: NDArray[np.float32],
    sampling: NDArray[np.void],
    history: list[int] | None = None,
    kernels: Kernels | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    count = len(sampling)
    logits = np.array(np.broadcast_to(logits, (count, logits.shape[-1])), np.float32)
    tokens, logprobs = np.zeros(count, np.int32), np.zeros(count, np.float32)
    top_tokens = np.full((count, MAX_TOP_LOGPROBS), -1, np.int32)
    top_logprobs = np.zeros((count, MAX_TOP_LOGPROBS), np.float32)
    (kernels or Kernels(1)).sample(
        logits,
        count,
        sampling.view(np.uint8).reshape(count, -1),
        np.array(history or [0], np.uint32),
        tokens,
        logprobs,
        top_tokens,
        top_logprobs,
    )
    return tokens, logprobs, top_tokens, top_logprobs


def softmax(logits: Doubles) -> Doubles:
    p = np.exp(logits - logits.max())
    result: Doubles = p / p.sum()
    return result


def assert_distribution(tokens: NDArray[np.int32], p: Doubles) -> None:
    """Pearson's chi-squared over tokens expected at least five times, within six standard deviations."""
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[p == 0].sum() == 0
    expected = p * len(tokens)
    frequent = expected >= 5
    observed = np.append(counts[frequent], counts[~frequent].sum())
    wanted = np.append(expected[frequent], expected[~frequent].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = max(len(wanted) - 1, 1)
    assert statistic < freedom + 6 * np.sqrt(2 * freedom)


def some_logits(vocabulary: int = 300, scale: float = 2.0, seed: int = 0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(vocabulary) * scale).astype(np.float32)


def expected_distribution(logits: NDArray[np.float32], **p: Any) -> Doubles:
    """The documented order of operations, the slow way."""
    values = logits.astype(np.float64) / p.get("temperature", 1.0)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    kept = order[: p.get("top_k") or len(order)]
    probability = softmax(values)
    mass = probability[kept] / probability[kept].sum()
    if p.get("top_p", 1.0) < 1:
        kept = kept[: int(np.searchsorted(np.cumsum(mass), p["top_p"] - 1e-9)) + 1]
    kept = [i for i in kept if probability[i] >= p.get("min_p", 0.0) * probability.max()]
    result = np.zeros(len(values))
    result[kept] = probability[kept] / probability[kept].sum()
    return result


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of Random123's philox4x32-10."""
    assert philox(0, [0] * 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox(2**64 - 1, [2**32 - 1] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert philox(0x299F31D0A4093822, pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 7},
        {"top_k": 1},
        {"top_p": 0.8},
        {"top_p": 0.99, "temperature": 2.0},
        {"min_p": 0.1},
        {"top_k": 50, "top_p": 0.7, "min_p": 0.05, "temperature": 1.5},
    ],
)
def test_tokens_follow_the_float64_distribution(parameters: dict[str, Any], instruction_set: str) -> None:
    logits = some_logits()
    sampling = rows(20_000, seed=np.arange(20_000), **parameters)
    tokens = draw(logits, sampling, kernels=Kernels(2, instruction_set))[0]
    assert_distribution(tokens, expected_distribution(logits, **parameters))


def test_positions_of_one_seed_are_as_independent_as_seeds() -> None:
    logits = some_logits(50)
    sampling = rows(20_000, seed=3, history_length=np.arange(1, 20_001))
    tokens = draw(logits, sampling, history=[0] * 20_001)[0]
    assert_distribution(tokens, softmax(logits.astype(np.float64)))
    pairs = tokens[:-1] * 50 + tokens[1:]
    p = softmax(logits.astype(np.float64))
    assert_distribution(pairs.astype(np.int32), np.outer(p, p).reshape(-1))


def test_unfiltered_and_filtered_ways_agree_when_the_filter_keeps_all() -> None:
    logits = some_logits(1000, scale=1.0)
    seeds = np.arange(500)
    plain = draw(logits, rows(500, seed=seeds))[0]
    filtered = draw(logits, rows(500, seed=seeds, top_p=np.nextafter(np.float32(1), np.float32(0))))[0]
    assert (plain == filtered).mean() > 0.99  # the last 6e-8 of probability may be cut
    np.testing.assert_array_equal(plain, draw(logits, rows(500, seed=seeds, min_p=1e-20))[0])
    np.testing.assert_array_equal(plain, draw(logits, rows(500, seed=seeds, top_k=1000))[0])


def test_a_row_gets_the_same_token_in_any_batch_on_any_threads() -> None:
    logits = np.stack([some_logits(5000, seed=i) for i in range(9)])
    sampling = rows(9, seed=np.arange(9), top_p=[1, 0.9] * 4 + [0.5], top_k=[0, 0, 5] * 3)
    together = draw(logits, sampling, kernels=Kernels(3))[0]
    alone = [draw(logits[i], sampling[i : i + 1])[0][0] for i in range(9)]
    np.testing.assert_array_equal(together, alone)


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    logits = some_logits(333)
    logits[[40, 200]] = 9.0
    assert draw(logits, rows(1, temperature=0.0))[0][0] == 40
    assert set(draw(logits, rows(300, seed=np.arange(300), top_k=1))[0]) == {40}


def test_filters_break_ties_by_the_lowest_id_and_count_exactly() -> None:
    for vocabulary in (128, 8192):
        logits = np.zeros(vocabulary, np.float32)
        assert set(draw(logits, rows(400, seed=np.arange(400), top_k=5))[0]) == set(range(5))
        eighth = draw(logits, rows(2000, seed=np.arange(2000), top_p=0.125))[0]
        assert eighth.max() < vocabulary // 8
        if vocabulary == 128:
            assert set(eighth) == set(range(16))


def test_suppressed_tokens_are_never_sampled() -> None:
    logits = some_logits(40)
    order = np.argsort(-logits)
    for temperature in (0.0, 1.0):
        sampling = rows(500, seed=np.arange(500), temperature=temperature, suppress_count=3)
        sampling["suppress"][:, :3] = order[:3]
        tokens = draw(logits, sampling)[0]
        assert not set(tokens) & set(order[:3].tolist())
    assert draw(logits, sampling[:1])[0][0] >= 0
    sampling["temperature"] = 0
    assert draw(logits, sampling[:1])[0][0] == order[3]


def test_penalties_change_the_distribution_as_documented() -> None:
    logits = some_logits(30)
    history = [1, 2, 2, 3, 3, 4, 4, 4, 29]  # four of the prompt, five generated
    values: dict[str, Any] = {
        "history_length": len(history),
        "prompt_tokens": 4,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
    }
    expected = logits.astype(np.float64)
    for token in set(history):
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token in set(history[4:]):
        expected[token] -= 0.2 * history[4:].count(token) + 0.4
    tokens = draw(logits, rows(20_000, seed=np.arange(20_000), **values), history)[0]
    assert_distribution(tokens, softmax(expected))
    assert draw(logits, rows(1, **(values | {"temperature": 0.0})), history)[0][0] == expected.argmax()


def test_penalties_leave_no_trace_in_later_rows() -> None:
    logits = some_logits(30)
    plain = draw(logits, rows(50, seed=np.arange(50)), [1, 2, 3])[0]
    mixed = rows(100, seed=np.repeat(np.arange(50), 2), history_length=3)
    mixed["frequency_penalty"][::2] = 2.0
    mixed["history_length"][1::2] = 1
    np.testing.assert_array_equal(draw(logits, mixed, [1, 2, 3])[0][1::2], plain)


def test_histories_lie_where_the_row_says() -> None:
    logits = np.zeros(10, np.float32)
    sampling = rows(2, temperature=0.0, frequency_penalty=1.0, history_offset=[1, 3], history_length=2)
    assert draw(logits, sampling, [9, 0, 1, 1, 2])[0].tolist() == [2, 0]


def test_logprobs_are_of_the_raw_logits_and_top_ones_are_ordered() -> None:
    logits = some_logits(20_000)
    logits[[7, 19_000]] = 20.0
    sampling = rows(50, seed=np.arange(50), logprobs=1, top_logprobs=5, temperature=2.0, frequency_penalty=1.0)
    tokens, logprobs, top_tokens, top_logprobs = draw(logits, sampling)
    exact = np.log(softmax(logits.astype(np.float64)))
    np.testing.assert_allclose(logprobs, exact[tokens], atol=1e-5)
    order = np.lexsort((np.arange(len(logits)), -logits))[:5]
    assert order[:2].tolist() == [7, 19_000]
    np.testing.assert_array_equal(top_tokens[:, :5], np.broadcast_to(order, (50, 5)))
    np.testing.assert_allclose(top_logprobs[:, :5], np.broadcast_to(exact[order], (50, 5)), atol=1e-5)
    assert (top_tokens[:, 5:] == -1).all()


def test_extreme_logits_and_parameters_give_a_token() -> None:
    logits = some_logits(64)
    for values in (
        {"temperature": 1e-30},
        {"temperature": 100.0},
        {"top_p": 1e-30},
        {"min_p": 1.0},
        {"repetition_penalty": 1e-30, "history_length": 1},
    ):
        assert 0 <= draw(logits, rows(1, **values))[0][0] < 64
    for broken in (np.full(64, -np.inf), np.full(64, np.nan), np.full(64, np.inf), np.full(64, 3e38)):
        assert 0 <= draw(broken.astype(np.float32), rows(1))[0][0] < 64


def test_a_vocabulary_smaller_than_the_alternatives_gives_what_there_is() -> None:
    tokens, _, top_tokens, _ = draw(np.zeros(3, np.float32), rows(1, logprobs=1, top_logprobs=20))
    assert tokens[0] < 3
    assert top_tokens[0, :3].tolist() == [0, 1, 2]


def test_rows_that_would_read_outside_their_history_are_refused() -> None:
    with pytest.raises(ValueError, match="history is too short"):
        draw(np.zeros(10, np.float32), rows(1, history_length=9), [1, 2])
