"""The kernels of mixtures: the choice of experts, grouped products and the weighted sum."""

from __future__ import annotations

import numpy as np
import pytest

from services.gpu_engine.cpu._kernels import Arena, Kernels, Linear, LinearGroup
from tests.gpu_engine.cpu.test_linear import instruction_sets, matrix, product


@pytest.mark.parametrize("normalized", [True, False])
def test_the_largest_experts_are_chosen_in_order_with_their_softmax(normalized: bool) -> None:
    logits = np.random.default_rng(0).standard_normal((50, 24)).astype(np.float32) * 3
    experts, weights = np.full((50, 5), -1, np.int32), np.zeros((50, 5), np.float32)
    Kernels(2).route(logits, 50, normalized, experts, weights)
    np.testing.assert_array_equal(experts, np.argsort(-logits, axis=1, kind="stable")[:, :5])
    exact = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    chosen = np.take_along_axis(exact, experts.astype(np.int64), 1)
    total = (chosen if normalized else exact).sum(1, keepdims=True)
    np.testing.assert_allclose(weights, chosen / total, rtol=1e-5)


def test_ties_go_to_the_lower_index_and_nan_stays_in_range() -> None:
    experts, weights = np.full((2, 3), -1, np.int32), np.zeros((2, 3), np.float32)
    logits = np.array([[1, 2, 2, 2, 1], [np.nan] * 5], np.float32)
    Kernels(1).route(logits, 2, True, experts, weights)
    assert experts[0].tolist() == [1, 2, 3]
    assert ((experts >= 0) & (experts < 5)).all()


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("inputs", [64, 50])
def test_grouped_products_equal_each_experts_own(instruction_set: str, inputs: int) -> None:
    kernels, group = Kernels(2, instruction_set), LinearGroup(Arena())
    counts = [0, 1, 40, 3, 0, 2]
    members = []
    for seed in range(len(counts)):
        parts = [matrix("F32", outputs, inputs, 10 * seed + outputs)[0] for outputs in (40, 33)]
        group.append(parts, ["F32", "F32"], [inputs] * 2)
        members.append(Linear(Arena(), parts, ["F32", "F32"], [inputs] * 2))
    assert len(group) == len(counts)
    start = np.cumsum([0, *counts]).astype(np.int32)
    x = np.random.default_rng(0).standard_normal((start[-1], inputs)).astype(np.float32)
    out = np.full((start[-1], 73), np.nan, np.float32)
    kernels.grouped_linear(group, start, x, out)
    for member, first, end in zip(members, start[:-1], start[1:], strict=True):
        np.testing.assert_array_equal(out[first:end], product(kernels, member, x[first:end]))


def test_results_are_added_in_the_order_of_choice() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((12, 33)).astype(np.float32)
    places = rng.permutation(12).reshape(4, 3).astype(np.int32)
    weights, before = rng.random((4, 3)).astype(np.float32), rng.standard_normal((4, 33)).astype(np.float32)
    out = before.copy()
    Kernels(2).combine(rows, places, weights, 4, out)
    exact = before + (rows[places].astype(np.float64) * weights[:, :, None]).sum(1)
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-5)


def test_places_and_shapes_outside_their_arrays_are_refused() -> None:
    kernels, group = Kernels(1), LinearGroup(Arena())
    group.append([matrix("F32", 8, 32)[0]], ["F32"], [32])
    with pytest.raises(ValueError, match="must have the same shape"):
        group.append([matrix("F32", 9, 32)[0]], ["F32"], [32])
    rows, out = np.zeros((4, 32), np.float32), np.zeros((4, 8), np.float32)
    for start in ([0], [0, 5], [2, 1], [-1, 2]):
        with pytest.raises(ValueError, match="row_start"):
            kernels.grouped_linear(group, np.array(start, np.int32), rows, out)
    with pytest.raises(ValueError, match="combine: places"):
        kernels.combine(rows, np.array([[4]], np.int32), np.ones((1, 1), np.float32), 1, rows.copy())
    with pytest.raises(ValueError, match="route: widths"):
        kernels.route(np.zeros((1, 2), np.float32), 1, True, np.zeros((1, 3), np.int32), np.zeros((1, 3), np.float32))
