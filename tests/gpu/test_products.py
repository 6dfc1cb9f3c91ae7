"""Matrix products against float64, and the one order of summation that all ways to compute them share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("cuda.bindings", reason="needs the CUDA libraries of blink[cuda]")

from services.gpu_engine.cuda.bfloat16 import from_bfloat16, to_bfloat16
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.cublas_lt import CublasLt, Ending, Operands, Shape
from services.gpu_engine.cuda.driver import Buffer, Device, Stream
from services.gpu_engine.cuda.products import MatrixProducts
from services.gpu_engine.cuda.skinny_gemm import SkinnyGemm
from services.gpu_engine.cuda.warm_up import warm_up

# n and k of products: Llama-3-8B's and SmolLM2-135M's.
PRODUCTS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (960, 576), (3072, 576), (576, 1536)]
LONG = (5120, 17920)  # Phi-4's product with the longest k
BUCKETS = [1, 2, 7, 8, 16, 33, 64, 65, 96, 128, 192, 256, 320, 512, 1024, 2048]


def random_bits(rng: np.random.Generator, shape: tuple[int, int], scale: float) -> NDArray[np.uint16]:
    return to_bfloat16((rng.standard_normal(shape) * scale).astype(np.float32))


@pytest.mark.parametrize("ending", ["bf16", "fp32"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 576, 1536), (7, 960, 576), (65, 4096, 4096), (300, 1000, 584)])
def test_every_algorithm_of_the_library_gives_the_product_of_float64(
    device: Device, stream: Stream, rng: np.random.Generator, m: int, n: int, k: int, ending: Ending
) -> None:
    library = CublasLt(device)
    shape = Shape(m, n, k, ending)
    x, weight = random_bits(rng, (m, k), 1.0), random_bits(rng, (n, k), k**-0.5)
    x_there, weight_there, out = Buffer.of(x), Buffer.of(weight), Buffer(shape.out_bytes)
    exact = from_bfloat16(x).astype(np.float64) @ from_bfloat16(weight).astype(np.float64).T
    for split in (False, True):
        for candidate in library.candidates(shape, split=split):
            out.fill(0xFF)
            library.launch(stream, shape, Operands(x_there.pointer, weight_there.pointer, out.pointer), candidate)
            stream.synchronize()
            fp32 = ending == "fp32"
            got = out.download(np.float32, (m, n)) if fp32 else from_bfloat16(out.download(np.uint16, (m, n)))
            assert np.linalg.norm(got - exact) < (1e-5 if fp32 else 4e-3) * np.linalg.norm(exact), candidate


@pytest.mark.parametrize("m", [16, 128, 2048])
def test_a_long_k_has_the_candidates_of_a_short_one(device: Device, m: int) -> None:
    n, k = LONG
    library = CublasLt(device)
    assert library.candidates(Shape(m, n, k, "bf16"), split=False) == library.candidates(
        Shape(m, n, 1024, "bf16"), split=False
    )


@pytest.mark.parametrize(("n", "k"), [*PRODUCTS, LONG])
def test_a_row_has_the_same_bits_in_every_bucket(
    device: Device, compiler: Compiler, stream: Stream, rng: np.random.Generator, n: int, k: int
) -> None:
    products = MatrixProducts(device, SkinnyGemm(device, compiler))
    x = Buffer.of(random_bits(rng, (BUCKETS[-1], k), 1.0))
    weight = Buffer.of(random_bits(rng, (n, k), k**-0.5))
    out = Buffer(2 * BUCKETS[-1] * n)

    def record(stream: Stream, bucket: int) -> None:
        products.matmul(stream, x.pointer, weight.pointer, out.pointer, m=bucket, n=n, k=k)

    warm_up(compiler, products, BUCKETS, record, record)
    reference: NDArray[np.uint16] | None = None
    for bucket in reversed(BUCKETS):
        out.fill(0xFF)
        record(stream, bucket)
        stream.synchronize()
        bits = out.download(np.uint16, (bucket, n))
        if reference is None:
            reference = bits
        different = int((bits != reference[:bucket]).any(axis=1).sum())
        assert different == 0, f"{different} of {bucket} rows differ"


def test_the_next_start_computes_products_the_same_way(
    device: Device, compiler: Compiler, rng: np.random.Generator, tmp_path: Path
) -> None:
    n, k, buckets = 4096, 4096, [8, 144, 192]  # an anchor, one between, an anchor
    x, out = Buffer.of(random_bits(rng, (buckets[-1], k), 1.0)), Buffer(2 * buckets[-1] * n)
    weights = [Buffer.of(random_bits(rng, (n, k), k**-0.5)) for _ in range(4)]

    def start() -> tuple[MatrixProducts, dict[Shape, list[Operands]]]:
        products = MatrixProducts(device, SkinnyGemm(device, compiler), tmp_path)

        def record(stream: Stream, bucket: int) -> None:
            for weight in weights:
                products.matmul(stream, x.pointer, weight.pointer, out.pointer, m=bucket, n=n, k=k)

        with products.observing() as unknown:
            for bucket in buckets:
                record(Stream(), bucket)
        warm_up(compiler, products, buckets, record, record)
        return products, unknown

    assert set(start()[1]) == {Shape(bucket, n, k, "bf16") for bucket in buckets}
    assert not start()[1]
