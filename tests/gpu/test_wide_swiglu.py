"""SwiGLU products of many tokens: against float64 NumPy, and bit for bit what the skinny kernel gives row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")

from services.gpu_engine.cuda.bfloat16 import from_bfloat16, to_bfloat16
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.cublas_lt import Operands, Shape
from services.gpu_engine.cuda.driver import Buffer, Device, Stream
from services.gpu_engine.cuda.products import WIDE, MatrixProducts, WideWays, kernel_of
from services.gpu_engine.cuda.skinny_gemm import MOST_TOKENS, SkinnyGemm
from services.gpu_engine.cuda.wide_schedule import TILES, WideTile
from services.gpu_engine.cuda.wide_swiglu import WideSwiglu
from tests.gpu.steps import KernelBench, poisoned, relative_error

Bits = NDArray[np.uint16]

ERROR = 8e-3  # both factors and the output are rounded to bf16
TOKENS = [65, 66, 127, 128, 129, 255, 256, 300, 2048]
SHAPES = {  # outputs, depth
    "one stage": (256, 64),
    "columns that end inside a stage": (136, 72),
    "outputs that end inside a tile": (1000, 328),
    "few outputs": (8, 4096),
    "many outputs, a deep sum": (4096, 4096),
    "SmolLM2-135M": (1536, 576),
}
LARGE = {  # gate-up of whole models: outputs, depth
    "Llama-3-8B": (14336, 4096),
    "Phi-4": (17920, 5120),
    "Qwen3-32B": (25600, 5120),
}


@pytest.fixture(scope="module", autouse=True)
def hopper(device: Device) -> None:
    if device.arch != "sm_90a":
        pytest.skip(f"wide products are made for sm_90a, this is {device.arch}")


@pytest.fixture(scope="module")
def wide(device: Device, compiler: Compiler) -> WideSwiglu:
    return WideSwiglu(device, compiler)


@pytest.fixture(scope="module")
def crowded(device: Device, compiler: Compiler) -> WideSwiglu:
    """Three clusters, so that each has many tiles."""
    return WideSwiglu(device, compiler, multiprocessors=7)


@pytest.fixture(scope="module")
def skinny(device: Device, compiler: Compiler) -> SkinnyGemm:
    return SkinnyGemm(device, compiler)


@dataclass
class Product:
    """Random operands: x [m, k], and a weight [2 n, k] that is gate over up."""

    rng: np.random.Generator
    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        self.x_bits, self.weight_bits = self._random(self.m, 1.0), self._random(2 * self.n, self.k**-0.5)
        self.x, self.weight = Buffer.of(self.x_bits), Buffer.of(self.weight_bits)

    def _random(self, rows: int, scale: float) -> Bits:
        return to_bfloat16(self.rng.standard_normal((rows, self.k), np.float32) * np.float32(scale))

    def exact(self) -> NDArray[np.float64]:
        x, weight = (from_bfloat16(bits).astype(np.float64) for bits in (self.x_bits, self.weight_bits))
        gate, up = np.split(x @ weight.T, 2, axis=1)
        return np.asarray(gate / (1 + np.exp(-gate)) * up)

    def by_skinny(self, skinny: SkinnyGemm, stream: Stream) -> Bits:
        out = poisoned(2 * self.m * self.n)
        for first in range(0, self.m, MOST_TOKENS):
            rows = min(MOST_TOKENS, self.m - first)
            x, target = self.x.pointer + 2 * self.k * first, out.pointer + 2 * self.n * first
            skinny.swiglu(stream, x, self.weight.pointer, target, m=rows, n=self.n, k=self.k)
        return out.download(np.uint16, (self.m, self.n))

    def by_wide(self, wide: WideSwiglu, stream: Stream, tile: WideTile) -> Bits:
        out = poisoned(2 * (self.m + 1) * self.n)
        wide.launch(stream, self.x.pointer, self.weight.pointer, out.pointer, m=self.m, n=self.n, k=self.k, tile=tile)
        found = out.download(np.uint16, (self.m + 1, self.n))
        assert (found[self.m] == 0xFFFF).all(), f"{tile}: rows beyond the product were written"
        return found[: self.m]


@pytest.mark.parametrize(("n", "k"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("m", TOKENS)
def test_every_tile_gives_the_bits_of_the_skinny_kernel(
    wide: WideSwiglu,
    crowded: WideSwiglu,
    skinny: SkinnyGemm,
    stream: Stream,
    rng: np.random.Generator,
    n: int,
    k: int,
    m: int,
) -> None:
    product = Product(rng, m, n, k)
    expected = product.by_skinny(skinny, stream)
    assert np.isfinite(from_bfloat16(expected)).all()
    for tile in TILES:
        for kernel in (wide, crowded):
            found = product.by_wide(kernel, stream, tile)
            np.testing.assert_array_equal(found, expected, err_msg=f"{tile}, {kernel.multiprocessors}")


@pytest.mark.parametrize("m", [65, 128, 300])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_product_is_that_of_float64(
    wide: WideSwiglu, stream: Stream, rng: np.random.Generator, m: int, tile: WideTile
) -> None:
    product = Product(rng, m, 1000, 1096)
    assert relative_error(from_bfloat16(product.by_wide(wide, stream, tile)), product.exact()) < ERROR


@pytest.mark.parametrize(("ffn", "depth"), LARGE.values(), ids=LARGE)
def test_products_of_whole_models_have_the_bits_of_the_skinny_kernel(
    wide: WideSwiglu, skinny: SkinnyGemm, stream: Stream, rng: np.random.Generator, ffn: int, depth: int
) -> None:
    product = Product(rng, 256, ffn, depth)
    expected = product.by_skinny(skinny, stream)
    for tile in TILES:
        np.testing.assert_array_equal(product.by_wide(wide, stream, tile), expected, err_msg=str(tile))


@pytest.mark.parametrize("m", [65, 128, 256, 512])
def test_in_order_are_all_of_ours_and_the_library_s_product_with_the_swiglu_kernel_behind_it(
    device: Device,
    compiler: Compiler,
    wide: WideSwiglu,
    skinny: SkinnyGemm,
    stream: Stream,
    rng: np.random.Generator,
    m: int,
) -> None:
    n, k = 1536, 2048
    bench, product = KernelBench(device, compiler, rng, [(0, m)], ffn=n), Product(rng, m, n, k)
    gate_up, out = Buffer(2 * m * 2 * n), Buffer(2 * m * n)
    products = MatrixProducts(device, skinny, wide=WideWays(wide, bench.kernels.swiglu, gate_up))
    shape, operands = Shape(m, n, k, "swiglu"), Operands(product.x.pointer, product.weight.pointer, out.pointer)
    expected = product.by_skinny(skinny, stream)
    same = products.in_order(stream, shape, operands)
    assert {way for way in products.candidates(shape) if way.startswith(WIDE)} <= {*same}
    assert {WIDE, "library"} == {*map(kernel_of, same)}
    for way in same:
        out.fill(0xFF)
        products.launch(stream, shape, operands, way)
        np.testing.assert_array_equal(out.download(np.uint16, (m, n)), expected, err_msg=way)


@pytest.mark.parametrize("tile", [WideTile(64, 128), WideTile(128, 160), WideTile(128, 256)], ids=str)
@pytest.mark.parametrize("m", [128, 200])
def test_overlapping_launches_give_the_bits_of_launches_one_at_a_time(
    wide: WideSwiglu, rng: np.random.Generator, m: int, tile: WideTile
) -> None:
    """Each product reads what the one before wrote, and writes what that one read: on a stream and in a graph."""
    width, stream = 2048, Stream(overlap=True)

    def random(rows: int, scale: float) -> Bits:
        return to_bfloat16(rng.standard_normal((rows, width), np.float32) * np.float32(scale))

    # So scaled that outputs neither overflow nor vanish: the largest is 133 or so.
    weights = [Buffer.of(random(2 * width, 1.3 * width**-0.5)) for _ in range(4)]
    values = random(m, 1.0)
    x, other = Buffer.of(values), Buffer(values.nbytes)

    def launch(after_each: Callable[[], None] = lambda: None) -> None:
        source, target = x, other
        for weight in weights:
            wide.launch(stream, source.pointer, weight.pointer, target.pointer, m=m, n=width, k=width, tile=tile)
            source, target = target, source
            after_each()

    def run(launched: Callable[[], None]) -> Bits:
        x.upload(values)
        other.fill(0xFF)
        launched()
        found = x.download(np.uint16, (m, width))
        assert 1 < np.abs(from_bfloat16(found)).max() < 1e4
        return found

    alone = run(lambda: launch(stream.synchronize))
    with stream.capture() as graphs:
        launch()
    for _ in range(20):
        np.testing.assert_array_equal(run(launch), alone)
        np.testing.assert_array_equal(run(lambda: graphs[0].launch(stream)), alone)
