"""Greedy tokens of the real model equal transformers' in float32 (goldens.json, written by make_goldens.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from services.gpu_engine.models.checkpoint import Checkpoint
from tests.gpu_engine.cpu.executor import Executor

GOLDENS = json.loads(Path(__file__).with_name("goldens.json").read_text())["goldens"]
CLEAR_MARGIN = 0.05


@pytest.mark.model
def test_greedy_tokens_equal_the_independent_fp32_reference(smollm2: Checkpoint) -> None:
    assert len(GOLDENS) == 12
    executor = Executor(smollm2, threads=2, sequences=len(GOLDENS), context=512)
    logits = executor.run({index: golden["prompt"] for index, golden in enumerate(GOLDENS)})
    clear = 0
    for position in range(32):
        for index, golden in enumerate(GOLDENS):
            best = np.partition(logits[index], -2)[-2:]
            assert abs((best[1] - best[0]) - golden["margins"][position]) < 5e-3
            if golden["margins"][position] > CLEAR_MARGIN:
                clear += 1
                assert int(logits[index].argmax()) == golden["tokens"][position], (index, position)
        logits = executor.run({index: [golden["tokens"][position]] for index, golden in enumerate(GOLDENS)})
    assert clear > 300
