"""How wide products are divided, and which ways to compute a product with SwiGLU there are."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra blink[cuda]")

from services.gpu_engine.cuda import products as products_module
from services.gpu_engine.cuda.cublas_lt import Operands, Shape
from services.gpu_engine.cuda.products import WIDE, MatrixProducts, WideWays
from services.gpu_engine.cuda.wide_schedule import CLUSTER, MOST_LIKELY, TILES, WidePlan, WideTile, likely_tiles

ROWS = [16, 3072, 28672, 35840, 51200]  # of gate and up
TOKENS = [65, 96, 128, 129, 192, 256, 300, 512, 2048, 8192]
NOTHING: Any = None


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_pairs_of_tiles_cover_the_product_and_none_is_outside(tile: WideTile, rows: int, tokens: int) -> None:
    plan = WidePlan.of(tile, tokens, rows)
    along_tokens, along_rows = (CLUSTER, 1) if plan.same_rows else (1, CLUSTER)
    assert plan.token_pairs * along_tokens * tile.tokens >= tokens > (plan.token_pairs - 1) * along_tokens * tile.tokens
    assert plan.row_pairs * along_rows * tile.rows >= rows > (plan.row_pairs - 1) * along_rows * tile.rows
    assert 1 <= plan.clusters(131) <= 65


@pytest.mark.parametrize(("tokens", "tile"), [(128, "128x224"), (256, "128x224"), (2048, "128x256"), (2048, "128x224")])
def test_the_fastest_tiles_of_llama_3_8b_are_compared(tokens: int, tile: str) -> None:
    """As measured (docs/decisions/0029-wide-swiglu.md)."""
    assert tile in map(str, likely_tiles(tokens, 28672, 131))


def test_few_tiles_are_compared_and_none_is_built_in_vain() -> None:
    found = [likely_tiles(tokens, rows, 131) for tokens in TOKENS for rows in ROWS]
    assert all(len(set(tiles)) == MOST_LIKELY for tiles in found)
    assert {tile for tiles in found for tile in tiles} == {*TILES}


def test_a_tile_is_written_as_it_is_read() -> None:
    for tile in TILES:
        assert WideTile.parse(str(tile)) == tile


class Launches:
    """In place of kernels: what was launched, in order."""

    version, multiprocessors = "none", 131

    def __init__(self, _device: object = None) -> None:
        self.seen: list[tuple[object, ...]] = []

    def candidates(self, shape: Shape, *, split: bool) -> list[str]:
        assert shape.ending != "swiglu"
        assert not split
        return ["132:00"]

    def launch(self, _stream: object, shape: Shape, operands: Operands, way: str) -> None:
        self.seen.append((shape, operands, way))


class WideLaunches(Launches):
    def launch(self, _stream: object, *operands: int, **sizes: object) -> None:  # type: ignore[override]
        self.seen.append((operands, sizes))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> MatrixProducts:
    monkeypatch.setattr(products_module, "CublasLt", Launches)
    device: Any = type("Named", (), {"name": "none"})
    skinny: Any = Launches()
    kernel: Any = WideLaunches()
    room: Any = type("Room", (), {"pointer": 99})
    wide = WideWays(kernel, lambda _stream, *arguments: kernel.seen.append(arguments), room)
    return MatrixProducts(device, skinny, wide=wide)


def test_a_product_with_swiglu_is_ours_or_the_library_s_with_a_kernel_behind_it(products: MatrixProducts) -> None:
    shape, operands = Shape(128, 512, 256, "swiglu"), Operands(1, 2, 3)
    assert products._wide
    own: Any = products._wide.kernel
    library: Any = products._library
    *wide, apart = products.candidates(shape)
    assert all(way.startswith(WIDE) for way in wide)
    products.launch(NOTHING, shape, operands, apart)
    assert library.seen == [(Shape(128, 1024, 256, "bf16"), Operands(1, 2, 99), apart)]
    assert own.seen == [(128, 99, 3)]
    products.launch(NOTHING, shape, operands, wide[0])
    tile = WideTile.parse(wide[0].removeprefix(WIDE))
    assert own.seen[1:] == [((1, 2, 3), {"m": 128, "n": 512, "k": 256, "tile": tile})]


def test_other_products_are_not_wide(products: MatrixProducts) -> None:
    few = [Shape(64, 512, 256, "swiglu"), Shape(64, 512, 256, "bf16"), Shape(64, 512, 256, "fp32")]
    for shape in [*few, Shape(128, 512, 256, "bf16"), Shape(128, 512, 256, "fp32")]:
        assert not any(way.startswith(WIDE) for way in products.candidates(shape))


def test_swiglu_is_fused_for_as_many_tokens_as_kernels_take(products: MatrixProducts) -> None:
    assert products.fuses_swiglu(64)
    assert products.fuses_swiglu(65)
    products._wide = None
    assert products.fuses_swiglu(64)
    assert not products.fuses_swiglu(65)
