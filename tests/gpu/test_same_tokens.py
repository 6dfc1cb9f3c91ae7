"""A prompt's greedy tokens are the same whatever shares its steps and however its prompt is cut: SmolLM2, exactly.

Where a token's context is computed anew after a preemption, prefill attention has computed what decode attention had,
in another order: there tokens may differ at a near tie, and only there.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs blink[cuda]")
from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.driver import Device, Stream
from services.gpu_engine.cuda.executor import StepExecutor
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.step_arrays import HostStep, StepArrays, StepLimits
from services.gpu_engine.cuda.weights import DeviceWeights
from services.gpu_engine.engine import EngineLimits
from services.gpu_engine.models.checkpoint import Checkpoint
from tests.gpu.model_serving import serving_model
from tests.gpu.steps import as_array, sampling_rows
from tests.gpu.test_smollm2 import CLEAR_MARGIN, GOLDENS

pytestmark = pytest.mark.model
GENERATED = 32
CHOSEN = [GOLDENS[i] for i in (0, 3, 7, 11)]  # prompts of 4, 25, 16 and 350 tokens
PAGE_SIZE = 16


def limits(*, prefix_cache: bool = False, share_decoded: bool = False, **changes: int) -> EngineLimits:
    sizes = {"page_size": PAGE_SIZE, "kv_pages": 8192, "max_running": 256, "max_batched_tokens": 512, "context": 512}
    return EngineLimits(
        **(sizes | changes),
        prefix_cache=prefix_cache,
        share_decoded=share_decoded,
        max_waiting=512,
        lease_timeout_ms=30_000,
    )


@pytest.fixture(scope="module")
def alone(device: Device, smollm2: Checkpoint) -> list[list[int]]:
    """The tokens of each chosen prompt, one request at a time."""
    found = []
    with serving_model(smollm2, limits()) as client:
        for golden in CHOSEN:
            stream = client.submit(golden["prompt"], GENERATED)
            client.finish()
            found.append(stream.tokens)
    return found


def test_in_a_batch_of_256(smollm2: Checkpoint, alone: list[list[int]]) -> None:
    rng = np.random.default_rng()
    with serving_model(smollm2, limits()) as client:
        others = [rng.integers(100, 40_000, int(rng.integers(1, 60))).tolist() for _ in range(252)]
        for prompt in others[:126]:
            client.submit(prompt, GENERATED + 8)
        streams = [client.submit(golden["prompt"], GENERATED) for golden in CHOSEN]
        for prompt in others[126:]:
            client.submit(prompt, GENERATED + 8)
        client.finish()
    assert [stream.tokens for stream in streams] == alone


@pytest.mark.parametrize("budget", [15, 20, 24])  # 16 and 25 tokens would leave one alone
def test_in_chunks(smollm2: Checkpoint, alone: list[list[int]], budget: int) -> None:
    with serving_model(smollm2, limits(max_batched_tokens=budget, max_running=4)) as client:
        for golden, tokens in zip(CHOSEN, alone, strict=True):
            stream = client.submit(golden["prompt"], GENERATED)
            client.finish()
            assert stream.tokens == tokens


def test_after_preemption(smollm2: Checkpoint, alone: list[list[int]]) -> None:
    pages = (512 + 64) // PAGE_SIZE
    with serving_model(smollm2, limits(kv_pages=pages, max_running=16)) as client:
        streams = [client.submit(golden["prompt"], GENERATED) for golden in (*CHOSEN, *CHOSEN, *CHOSEN)]
        client.finish()
        assert client.preemptions() > 0
    for stream, golden, tokens in zip(streams, CHOSEN * 3, alone * 3, strict=True):
        differing = [i for i in range(GENERATED) if stream.tokens[i] != tokens[i]][:1]
        assert all(golden["margins"][i] < CLEAR_MARGIN for i in differing)


def test_without_graphs(device: Device, compiler: Compiler, smollm2: Checkpoint, alone: list[list[int]]) -> None:
    pages = limits().context // PAGE_SIZE
    step_limits = StepLimits(512, 256, pages)
    arrays = StepArrays(step_limits)
    executor = StepExecutor(
        device,
        Geometry(smollm2.config, PAGE_SIZE),
        smollm2.layers,
        DeviceWeights(smollm2),
        step=arrays.addresses,
        limits=step_limits,
        pages=pages,
        compiler=compiler,
    )
    stream = Stream()

    def next_token(token_ids: list[int], computed: int) -> int:
        arrays.upload(one_row(token_ids, computed, pages))
        executor.launch(stream, len(token_ids), 1)
        stream.synchronize()
        return int(arrays.result(1).tokens[0])

    for golden, expected in zip(CHOSEN, alone, strict=True):
        tokens = [next_token(golden["prompt"], 0)]
        while len(tokens) < GENERATED:
            tokens.append(next_token(tokens[-1:], len(golden["prompt"]) + len(tokens) - 1))
        assert tokens == expected


def one_row(token_ids: list[int], computed: int, pages: int) -> HostStep:
    """A step of one sequence, whose pages lie in order."""
    end = computed + len(token_ids)
    return HostStep(
        token_ids=as_array(token_ids),
        positions=as_array(range(computed, end)),
        row_start=as_array([0, len(token_ids)]),
        kv_length=as_array([end]),
        sequence=as_array([0]),
        page_table=as_array([range(pages)]),
        sample_row=as_array([0]),
        sampling=sampling_rows(1, temperature=0.0),
        history=np.zeros(1, np.uint32),
    )
