"""Every family against transformers (family_goldens.json) and a float64 reference; the same bits however it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.loader import open_checkpoint
from tests.gpu_engine.cpu import reference
from tests.gpu_engine.cpu.executor import Executor
from tests.gpu_engine.cpu.make_family_goldens import OUTPUT, TOKENS, prompt
from tests.gpu_engine.models.tiny import random_weights, write_hugging_face
from tests.gpu_engine.models.variants import ORIGINAL_CONTEXT, VARIANTS

GOLDENS: dict[str, dict[str, Any]] = json.loads(OUTPUT.read_text())["goldens"]
ERROR = 1e-4  # of a logit, beside transformers in float32


def checkpoint_of(name: str, folder: Path, **options: Any) -> Checkpoint:
    config, changes = VARIANTS[name]
    write_hugging_face(folder, config, random_weights(config), **options, **changes)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == config
    return checkpoint


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("shards", [1, 3])
def test_prefill_logits_and_greedy_tokens_equal_transformers(tmp_path: Path, variant: str, shards: int) -> None:
    executor, golden = Executor(checkpoint_of(variant, tmp_path, shards=shards)), GOLDENS[variant]
    logits = executor.run({0: prompt()})[0]
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=ERROR)
    clear = 0
    for token, margin in zip(golden["tokens"], golden["margins"], strict=True):
        best = np.partition(logits, -2)[-2:]
        assert abs(best[1] - best[0] - margin) < 2 * ERROR
        if margin > 2 * ERROR:
            clear += 1
            assert int(logits.argmax()) == token
        logits = executor.run({0: [token]})[0]
    assert clear > TOKENS // 2


def test_every_position_matches_the_float64_reference(tmp_path: Path, variant: str) -> None:
    config, _ = VARIANTS[variant]
    executor, tokens = Executor(checkpoint_of(variant, tmp_path)), prompt()
    expected = reference.logits(config, random_weights(config), tokens)
    got = [executor.run({0: [token]})[0] for token in tokens]
    np.testing.assert_allclose(got, expected, rtol=0, atol=5e-5)


def test_a_sequence_gets_the_same_bits_in_every_batch_and_chunking(tmp_path: Path, variant: str) -> None:
    checkpoint = checkpoint_of(variant, tmp_path, dtype="BF16")
    prompts = [prompt()[start : start + length] for start, length in ((0, 90), (3, 1), (5, 33), (40, 50), (11, 17))]
    expected = [Executor(checkpoint).run({0: tokens})[0] for tokens in prompts]
    np.testing.assert_array_equal(Executor(checkpoint, threads=2).run(dict(enumerate(prompts))), expected)

    rng = np.random.default_rng()
    executor, left = Executor(checkpoint, threads=2, page_size=32), dict(enumerate(prompts))
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


def test_longrope_uses_its_short_factors_when_the_engine_serves_the_original_context(tmp_path: Path) -> None:
    checkpoint, tokens = checkpoint_of("phi4-mini", tmp_path), prompt()[: ORIGINAL_CONTEXT - 1]
    short = Executor(checkpoint, context=ORIGINAL_CONTEXT).run({0: tokens})[0]
    np.testing.assert_allclose(short, GOLDENS["phi4-mini"]["short_logits"], rtol=0, atol=ERROR)
    long = Executor(checkpoint, context=ORIGINAL_CONTEXT + 16).run({0: tokens})[0]
    assert np.abs(long - short).max() > 100 * ERROR
