"""Matrix products: exact stored values, close to float64, and the same bits whatever the batch and the threads."""

from __future__ import annotations

import contextlib

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from services.gpu_engine.cpu._kernels import Arena, Kernels, Linear

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 24, 25, 40]


def instruction_sets() -> list[str]:
    """Those that this CPU has."""
    found = []
    for name in ("avx512", "avx2", "baseline"):
        with contextlib.suppress(ValueError):
            found.append(Kernels(1, name).instruction_set)
    return found


def matrix(kind: str, outputs: int, inputs: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Random stored bytes, and what they are worth."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((outputs, inputs)).astype(np.float32)
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    worth = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    return np.ascontiguousarray(stored).view(np.uint8).reshape(outputs, -1), worth


def product(kernels: Kernels, linear: Linear, x: NDArray[np.float32]) -> NDArray[np.float32]:
    out = np.full((len(x), linear.outputs), np.nan, np.float32)
    kernels.linear(linear, x, len(x), out)
    return out


def assert_product(got: NDArray[np.float32], x: NDArray[np.float32], w: NDArray[np.float32]) -> None:
    """Within the bound of float32 sums: n rounding errors of half a unit, relative to the sum of magnitudes."""
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    magnitudes = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    assert (np.abs(got - exact) <= 2 * x.shape[1] * 2.0**-24 * magnitudes).all()


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("kind", TYPES)
def test_rows_come_back_as_gguf_dequantizes_them(kind: str, instruction_set: str) -> None:
    stored, worth = matrix(kind, 50, 96)
    linear = Linear(Arena(), [stored], [kind], [96])
    ids = np.array([0, 49, 17, 16, 15, 3], np.int32)
    out = np.zeros((6, 96), np.float32)
    Kernels(1, instruction_set).embed(linear, ids, 6, out)
    np.testing.assert_array_equal(out, worth[ids])


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("kind", TYPES)
def test_products_match_float64(kind: str, instruction_set: str) -> None:
    stored, worth = matrix(kind, 83, 160)
    linear = Linear(Arena(), [stored], [kind], [160])
    kernels = Kernels(1, instruction_set)
    for rows in ROWS:
        x = np.random.default_rng(rows).standard_normal((rows, 160)).astype(np.float32)
        assert_product(product(kernels, linear, x), x, worth)


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("kind", TYPES)
def test_a_row_gets_the_same_bits_in_every_batch_and_on_any_number_of_threads(kind: str, instruction_set: str) -> None:
    stored, _ = matrix(kind, 400, 64)
    linear = Linear(Arena(), [stored], [kind], [64])
    alone, together = Kernels(1, instruction_set), Kernels(3, instruction_set)
    x = np.random.default_rng(0).standard_normal((max(ROWS), 64)).astype(np.float32)
    expected = np.concatenate([product(alone, linear, row[None]) for row in x])
    for rows in ROWS:
        for kernels in (alone, together):
            np.testing.assert_array_equal(product(kernels, linear, x[:rows]), expected[:rows])


@pytest.mark.parametrize("rows", [1, 40])
def test_matrices_side_by_side_equal_each_alone_even_of_different_types(rows: int) -> None:
    parts = [matrix("Q4_1", 33, 64, 1), matrix("Q8_0", 16, 64, 2), matrix("F16", 21, 64, 3)]
    kinds = ["Q4_1", "Q8_0", "F16"]
    kernels = Kernels(2)
    x = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
    together = product(kernels, Linear(Arena(), [stored for stored, _ in parts], kinds, [64] * 3), x)
    alone = [product(kernels, Linear(Arena(), [s], [kind], [64]), x) for (s, _), kind in zip(parts, kinds, strict=True)]
    np.testing.assert_array_equal(together, np.concatenate(alone, axis=1))


@pytest.mark.parametrize("outputs", [1, 15, 17, 48])
@pytest.mark.parametrize("inputs", [1, 31, 33, 100])
def test_any_shape_of_plain_numbers_works(outputs: int, inputs: int) -> None:
    stored, worth = matrix("F32", outputs, inputs)
    x = np.random.default_rng(0).standard_normal((5, inputs)).astype(np.float32)
    for rows in (1, 5):
        got = product(Kernels(1), Linear(Arena(), [stored], ["F32"], [inputs]), x[:rows])
        assert_product(got, x[:rows], worth)


def test_accumulate_adds_the_finished_product() -> None:
    stored, _ = matrix("F32", 33, 64)
    linear, kernels = Linear(Arena(), [stored], ["F32"], [64]), Kernels(1)
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    before = np.random.default_rng(1).standard_normal((3, 33)).astype(np.float32)
    out = before.copy()
    kernels.linear(linear, x, 3, out, accumulate=True)
    np.testing.assert_array_equal(out, before + product(kernels, linear, x))


def test_half_precision_extremes_are_exact() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits.view(np.float16)
    finite = halves[np.isfinite(halves)].reshape(-1, 32)
    linear = Linear(Arena(), [finite.view(np.uint8)], ["F16"], [32])
    for name in instruction_sets():
        out = np.zeros(finite.shape, np.float32)
        Kernels(1, name).embed(linear, np.arange(len(finite), dtype=np.int32), len(finite), out)
        np.testing.assert_array_equal(out, finite.astype(np.float32))


def test_wrong_shapes_and_types_are_refused() -> None:
    stored, _ = matrix("F32", 20, 64)
    with pytest.raises(ValueError, match="unknown weight type Q5_1"):
        Linear(Arena(), [stored], ["Q5_1"], [64])
    with pytest.raises(ValueError, match="must have the same inputs"):
        Linear(Arena(), [stored, stored], ["F32", "F32"], [64, 32])
    linear, kernels = Linear(Arena(), [stored], ["F32"], [64]), Kernels(1)
    with pytest.raises(ValueError, match="in is not as wide"):
        kernels.linear(linear, np.zeros((1, 63), np.float32), 1, np.zeros((1, 20), np.float32))
    with pytest.raises(ValueError, match="out is not as wide"):
        kernels.linear(linear, np.zeros((1, 64), np.float32), 1, np.zeros((1, 21), np.float32))
    with pytest.raises(ValueError, match="tokens"):
        kernels.linear(linear, np.zeros((1, 64), np.float32), 2, np.zeros((2, 20), np.float32))
    with pytest.raises(ValueError, match="no mmx"):
        Kernels(1, "mmx")
