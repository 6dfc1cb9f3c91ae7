"""How the blocks of a skinny product share its weights."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")

from services.gpu_engine.cuda.skinny_gemm import blocks_of


@pytest.mark.parametrize("chunks", [1, 7, 72, 120, 131, 132, 2048, 3072, 4800, 7168, 11200, 64128])
@pytest.mark.parametrize("most", [1, 7, 131, 147])
def test_no_block_is_without_work_and_few_are_left_out(chunks: int, most: int) -> None:
    blocks = blocks_of(chunks, most)
    assert 1 <= blocks <= min(chunks, most)
    assert blocks > most * 15 // 16 or blocks == chunks


@pytest.mark.parametrize("chunks", [2048, 3072, 7168, 14336, 64128])
def test_llama_3_8b_is_shared_equally_by_128_of_an_h200s_multiprocessors(chunks: int) -> None:
    assert blocks_of(chunks, 131) == 128
