"""Steps of few tokens, with and without overlapping launches, against transformers on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")
from services.gpu_engine.cuda.choosing import excerpt_of
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Device, Stream
from services.gpu_engine.cuda.products import MatrixProducts, WideWays
from services.gpu_engine.cuda.skinny_gemm import SkinnyGemm
from services.gpu_engine.cuda.warm_up import warm_up
from services.gpu_engine.cuda.wide_swiglu import WideSwiglu
from services.gpu_engine.models.family import Layer
from tests.gpu.steps import POISON, relative_error
from tests.gpu.test_step import GEOMETRIES, Model, Script, Sequences, load, poison, reference_logits

torch = pytest.importorskip("torch", reason="compares with transformers")
transformers = pytest.importorskip("transformers", reason="compares with transformers")

ROWS = 6
SCRIPT: Script = [
    [17, 1, 0, 40],
    [64, 0, 0, 0],
    [1, 20, 3, 1],
    [1, 1, 60, 1],
    *[[1, 1, 1, 1]] * 8,
    [1, 0, 0, 0],
    [30, 1, 0, 33],
]


@pytest.fixture(scope="module", params=["grouped", "group of 3, tied", "head size 128"])
def model(
    request: pytest.FixtureRequest, device: Device, compiler: Compiler, tmp_path_factory: pytest.TempPathFactory
) -> Model:
    config = transformers.LlamaConfig(
        vocab_size=1000,
        num_hidden_layers=4,
        intermediate_size=1088,
        max_position_embeddings=640,
        **GEOMETRIES[request.param],
    )
    made = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    for name, parameter in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    folder: Path = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    exact: Any = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    arrays, executor = load(device, compiler, folder)
    return Model(exact, None, arrays, executor, config.vocab_size, 0.02)


def logits_of(model: Model, stream: Stream, sequences: Sequences, counts: list[int]) -> NDArray[np.float32]:
    """Logits of the rows of the script's next step, in the smallest bucket that holds it."""
    step = sequences.step(counts)
    poison(model.executor)
    model.arrays.upload(step)
    model.executor.launch(stream, step.tokens, ROWS)
    stream.synchronize()
    return model.executor.activations.logits.download(np.float32, (ROWS, model.vocabulary))[: step.sample_row.size]


@pytest.mark.parametrize("overlap", [False, True])
def test_logits_of_small_steps_match_transformers(
    model: Model, device: Device, rng: np.random.Generator, overlap: bool
) -> None:
    stream = Stream(overlap=overlap)
    model.executor.cache.fill(POISON)
    sequences = Sequences(rng, SCRIPT, model.vocabulary)
    exact = reference_logits(model.exact, sequences)
    errors = []
    for counts in SCRIPT:
        found = logits_of(model, stream, sequences, counts)
        for logits, i in zip(found, (i for i, count in enumerate(counts) if count), strict=True):
            errors.append(relative_error(logits, exact[i][sequences.computed[i] - 1]))
    print(f"largest error {max(errors):.2e}")
    assert max(errors) < 1e-2


def test_overlapping_steps_in_graphs_repeat_the_bits_of_steps_one_kernel_at_a_time(
    model: Model, device: Device, rng: np.random.Generator
) -> None:
    alone, overlapping = Stream(), Stream(overlap=True)
    seed = int(rng.integers(1 << 32))

    def run(graphs: bool) -> list[NDArray[np.float32]]:
        model.executor.cache.fill(POISON)
        sequences = Sequences(np.random.default_rng(seed), SCRIPT, model.vocabulary)
        results = []
        for counts in SCRIPT:
            if not graphs:
                results.append(logits_of(model, alone, sequences, counts))
                continue
            step = sequences.step(counts)
            poison(model.executor)
            model.arrays.upload(step)
            with overlapping.capture() as captured:
                model.executor.launch(overlapping, step.tokens, ROWS)
            captured[0].launch(overlapping)
            overlapping.synchronize()
            logits = model.executor.activations.logits.download(np.float32, (ROWS, model.vocabulary))
            results.append(logits[: step.sample_row.size])
        return results

    expected = run(graphs=False)
    for _ in range(5):
        for found, wanted in zip(run(graphs=True), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_row_has_the_same_logits_alone_and_in_every_bucket(
    model: Model, device: Device, rng: np.random.Generator
) -> None:
    """Up to 64 tokens by way of skinny products, above by cuBLASLt."""
    stream = Stream(overlap=True)
    script: Script = [[9, 5, 30, 20], [1, 1, 1, 1]]
    model.executor.cache.fill(POISON)
    sequences = Sequences(rng, script, model.vocabulary)
    logits_of(model, stream, sequences, script[0])
    step = sequences.step(script[1])
    results = []
    for tokens in (4, 5, 8, 9, 16, 24, 32, 40, 64, 65, 72, 96, 128, 192, 256):
        poison(model.executor)
        model.arrays.upload(step)
        model.executor.launch(stream, tokens, min(tokens, ROWS))
        stream.synchronize()
        results.append(model.executor.activations.logits.download(np.float32, (4, model.vocabulary)))
    for found in results[1:]:
        np.testing.assert_array_equal(found, results[0])


def test_choosing_products_by_the_time_of_the_step_changes_no_bit_of_it(
    model: Model, device: Device, compiler: Compiler, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = model.executor
    wide = WideWays(WideSwiglu(device, compiler), executor.kernels.swiglu, executor.activations.gate_up)
    products = MatrixProducts(device, SkinnyGemm(device, compiler), wide=wide)
    monkeypatch.setattr(model.executor, "products", products)
    stream, buckets = Stream(), [4, 16, 64, 72, 128]
    script: Script = [[9, 5, 30, 20], [1, 1, 1, 1]]
    model.executor.cache.fill(POISON)
    sequences = Sequences(rng, script, model.vocabulary)
    logits_of(model, stream, sequences, script[0])
    step = sequences.step(script[1])

    def record(stream: Stream, bucket: int, layers: Sequence[Layer] | None = None) -> None:
        model.executor.launch(stream, bucket, min(bucket, ROWS), layers)

    def logits(bucket: int) -> NDArray[np.float32]:
        poison(model.executor)
        model.arrays.upload(step)
        record(stream, bucket)
        stream.synchronize()
        return model.executor.activations.logits.download(np.float32, (4, model.vocabulary))

    expected = logits(4)
    model.arrays.counts.fill(0)
    excerpt = excerpt_of(model.executor.layers)
    assert len(excerpt) < len(model.executor.layers)
    warm_up(compiler, products, buckets, record, partial(record, layers=excerpt))
    with products.observing() as unsettled:
        for bucket in buckets:
            np.testing.assert_array_equal(logits(bucket), expected)
    assert not unsettled


def test_a_sequence_has_the_same_logits_alone_and_beside_the_prompts_of_others(
    model: Model, device: Device, rng: np.random.Generator
) -> None:
    """Its prompt and every token after it: in steps of 1 to 30 tokens alone, in steps of up to 172 beside others."""
    stream, seed = Stream(overlap=True), int(rng.integers(1 << 32))
    own = [30, 1, 1, 7, 1, 1]
    beside = [[35, 60, 0], [64, 0, 0], [40, 30, 90], [1, 80, 1], [1, 1, 1], [70, 1, 100]]

    def run(others: list[list[int]]) -> list[NDArray[np.float32]]:
        script: Script = [[count, *counts] for count, counts in zip(own, others, strict=True)]
        model.executor.cache.fill(POISON)
        # The first sequence's tokens are drawn first: the same in both scripts.
        sequences = Sequences(np.random.default_rng(seed), script, model.vocabulary)
        return [logits_of(model, stream, sequences, counts)[0] for counts in script]

    alone, together = run([[0, 0, 0]] * len(own)), run(beside)
    for found, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(found, expected)
