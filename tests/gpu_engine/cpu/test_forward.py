"""The forward pass against a float64 reference; the same bits in every batch, chunking, placement and thread count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.config import LinearScaling, Llama3Scaling, YarnScaling
from services.gpu_engine.models.loader import open_checkpoint
from tests.gpu_engine.cpu import reference
from tests.gpu_engine.cpu.executor import Executor
from tests.gpu_engine.cpu.test_linear import instruction_sets
from tests.gpu_engine.models.tiny import random_weights, tiny_config, write_gguf, write_hugging_face

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def prompt(length: int, seed: int = 0, vocabulary: int = 250) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocabulary, length)]


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, None),
        ({"tied_embeddings": True, "kv_heads": 4}, None),
        ({"kv_heads": 1}, None),
        ({"heads": 10, "kv_heads": 2, "hidden": 80}, None),
        ({"head_dim": 80}, None),
        ({"rope_scaling": LinearScaling(2.0)}, {"type": "linear", "factor": 2.0}),
        ({"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64)}, LLAMA3),
        ({"rope_scaling": YarnScaling(4.0, 64, 0.1 * np.log(4.0) + 1), "head_dim": 32}, YARN),
    ],
)
def test_logits_match_the_reference_for_every_geometry_and_scaling(
    tmp_path: Path, changes: dict[str, Any], rope: dict[str, Any] | None
) -> None:
    config = tiny_config(**changes)
    weights = write_hugging_face(tmp_path, config, random_weights(config), rope_scaling=rope)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == config
    tokens = prompt(100)
    expected = reference.logits(config, weights, tokens)
    executor = Executor(checkpoint)
    got = [executor.run({0: tokens[:70]})[0]] + [executor.run({0: [token]})[0] for token in tokens[70:]]
    np.testing.assert_allclose(got, expected[69:], rtol=0, atol=5e-5)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_logits_match_for_every_safetensors_dtype(tmp_path: Path, dtype: str) -> None:
    config = tiny_config()
    weights = write_hugging_face(tmp_path, config, random_weights(config), dtype, shards=2)
    got = Executor(open_checkpoint(tmp_path)).run({0: prompt(40)})
    np.testing.assert_allclose(got[0], reference.logits(config, weights, prompt(40))[-1], rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_logits_match_for_every_gguf_type(tmp_path: Path, kind: str) -> None:
    config = tiny_config()
    weights = write_gguf(tmp_path / "m.gguf", config, random_weights(config), gguf.GGMLQuantizationType[kind])
    got = Executor(open_checkpoint(tmp_path)).run({0: prompt(40)})
    np.testing.assert_allclose(got[0], reference.logits(config, weights, prompt(40))[-1], rtol=0, atol=5e-5)


@pytest.fixture
def tiny(tmp_path: Path) -> Checkpoint:
    config = tiny_config(heads=6, kv_heads=2)
    write_gguf(tmp_path / "m.gguf", config, random_weights(config), gguf.GGMLQuantizationType.Q4_1)
    return open_checkpoint(tmp_path)


def alone(checkpoint: Checkpoint, prompts: list[list[int]], **options: Any) -> list[NDArray[np.float32]]:
    return [Executor(checkpoint, **options).run({0: tokens})[0] for tokens in prompts]


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_a_sequence_gets_the_same_bits_in_every_batch_chunking_and_page_placement(
    tiny: Checkpoint, instruction_set: str
) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 5, 16, 17, 33, 100, 130, 150)]
    expected = alone(tiny, prompts, instruction_set=instruction_set)
    for threads, page_size, seed in ((1, 16, 1), (3, 32, 2), (2, 48, 3)):
        executor = Executor(tiny, threads=threads, page_size=page_size, seed=seed, instruction_set=instruction_set)
        whole = executor.run(dict(enumerate(prompts)))
        np.testing.assert_array_equal(whole, expected)

        rng = np.random.default_rng(seed)
        executor = Executor(tiny, threads=threads, page_size=page_size, seed=seed, instruction_set=instruction_set)
        left = dict(enumerate(prompts))
        while left:
            rows = {sequence: tokens[: rng.integers(1, 30)] for sequence, tokens in left.items() if rng.random() < 0.7}
            if not rows:
                continue
            out = executor.run(rows)
            for index, (sequence, tokens) in enumerate(rows.items()):
                left[sequence] = left[sequence][len(tokens) :]
                if not left[sequence]:
                    del left[sequence]
                    np.testing.assert_array_equal(out[index], expected[sequence])


def test_recomputing_a_sequence_in_other_pages_gives_the_same_bits(tiny: Checkpoint) -> None:
    tokens = prompt(90)
    executor = Executor(tiny)
    first = executor.run({0: tokens[:80]})
    decoded = [executor.run({0: [token]})[0] for token in tokens[80:]]
    again = executor.run({3: tokens})
    np.testing.assert_array_equal(decoded[-1], again[0])
    np.testing.assert_array_equal(first, executor.run({5: tokens[:80]}))


def test_heartbeats_come_between_layers(tiny: Checkpoint) -> None:
    executor, beats = Executor(tiny), list[int]()
    executor.forward.run(executor.step({0: [1, 2, 3]}), lambda: beats.append(1))
    assert len(beats) == len(tiny.layers)
