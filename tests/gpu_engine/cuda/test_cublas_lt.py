"""What cuBLASLt is asked for, and what of its suggestions is taken."""

from __future__ import annotations

import ctypes
from collections.abc import Collection

import pytest

pytest.importorskip("cuda.bindings", reason="needs the CUDA libraries of blink[cuda]")

from services.gpu_engine.cuda.cublas_lt import Algorithm, CublasLt, Shape, _Heuristic
from services.gpu_engine.cuda.errors import DriverError

LONG = Shape(128, 5120, 17_936, "bf16")  # 16 more than a multiple of 64
SHORT = LONG._replace(k=1040)


class Suggesting(CublasLt):
    """One suggestion for each k, which says so in its bytes; those for ``refused`` are not accepted."""

    def __init__(self, refused: Collection[int] = ()) -> None:
        self.asked: list[Shape] = []
        self._refused = refused
        self._operations = {132: ctypes.c_void_p()}

    def __del__(self) -> None: ...

    def _suggestions(self, shape: Shape, operation: ctypes.c_void_p, reductions: int) -> list[_Heuristic]:
        self.asked.append(shape)
        heuristic = _Heuristic()
        heuristic.algorithm.data[0] = shape.k
        return [heuristic]

    def _accepts(self, shape: Shape, operation: ctypes.c_void_p, algorithm: Algorithm) -> bool:
        assert shape == LONG
        return algorithm.data[0] not in self._refused


def suggested_for(candidate: str) -> int:
    return int.from_bytes(bytes.fromhex(candidate.partition(":")[2])[:8], "little")


def test_without_a_split_suggestions_are_those_for_a_short_k_as_well_aligned() -> None:
    library = Suggesting()
    assert [suggested_for(each) for each in library.candidates(LONG, split=False)] == [SHORT.k]
    assert library.asked == [SHORT]


def test_with_a_split_the_library_is_asked_for_k_itself() -> None:
    library = Suggesting()
    assert [suggested_for(each) for each in library.candidates(LONG, split=True)] == [LONG.k]
    assert library.asked == [LONG]


def test_where_no_suggestion_for_a_short_k_is_accepted_those_for_k_itself_count() -> None:
    library = Suggesting(refused={SHORT.k})
    assert [suggested_for(each) for each in library.candidates(LONG, split=False)] == [LONG.k]


def test_a_product_for_which_nothing_is_accepted_is_named() -> None:
    with pytest.raises(DriverError, match=r"no algorithm.*k=17936"):
        Suggesting(refused={SHORT.k, LONG.k}).candidates(LONG, split=False)
