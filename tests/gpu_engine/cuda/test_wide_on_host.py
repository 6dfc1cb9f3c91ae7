"""The wide product with SwiGLU, compiled for the host: tiles, pairs and tails, and the ring of two blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gpu_engine.cuda.wide_schedule import TILES, WidePlan, WideTile
from tests.gpu_engine.cuda.on_host import run_on_host

CASES = {
    # tile, tokens, outputs, depth, multiprocessors
    "a pair of tokens' tiles": ("128x128", 200, 200, 328, 131),
    "a pair of rows' tiles, the second outside": ("128x192", 77, 88, 64, 131),
    "several tiles of a block, more stages than the ring has": ("64x128", 129, 136, 1032, 4),
    "bands of tokens, tiles of fewer stages than the ring has": ("64x128", 64 * 18 + 3, 72, 72, 6),
    "half of a tile's rows are no multiple of 32": ("128x160", 128, 200, 200, 131),
    "half of a warpgroup's columns are no multiple of 32": ("64x192", 129, 104, 136, 131),
    "the widest tile": ("128x256", 130, 264, 136, 2),
    "warpgroups side by side along the rows": ("64x256", 65, 168, 72, 2),
    "outputs that end inside a slice": ("128x224", 256, 232, 264, 131),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_product_has_the_bits_of_a_loop_in_the_order_of_summation(
    tmp_path: Path, case: tuple[str, int, int, int, int]
) -> None:
    name, tokens, outputs, depth, multiprocessors = case
    tile = WideTile.parse(name)
    plan = WidePlan.of(tile, tokens, 2 * outputs)
    numbers = (plan.clusters(multiprocessors), plan.token_pairs, plan.row_pairs, int(plan.same_rows))
    defines = {name.removeprefix("BLINK_"): value for name, value in tile.defines.items()}
    arguments = [str(number) for number in (tokens, outputs, depth, *numbers)]
    result = run_on_host(tmp_path, "wide_swiglu.cpp", defines, arguments)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_tile_has_a_case() -> None:
    assert {name for name, *_ in CASES.values()} == {str(tile) for tile in TILES}
