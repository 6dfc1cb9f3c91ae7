"""The control loop over a real ring: same tokens whatever else runs, orders obeyed, failures visible."""

from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from services.gpu_engine.cpu.kv_cache import KvCache, page_bytes
from services.gpu_engine.engine import EngineError
from services.gpu_engine.models.checkpoint import Checkpoint
from services.gpu_engine.models.loader import open_checkpoint
from services.ring.schema import Command, DescriptorFlag, EngineState, FinishReason
from tests.gpu_engine.cpu.executor import Executor
from tests.gpu_engine.cpu.running import RunningEngine, running, wait_until
from tests.gpu_engine.models.tiny import random_weights, tiny_config, write_gguf

SAMPLED = {"temperature": 1.0, "seed": 11, "top_p": 0.9}


@pytest.fixture
def tiny(tmp_path: Path) -> Checkpoint:
    config = tiny_config()
    write_gguf(tmp_path / "m.gguf", config, random_weights(config), gguf.GGMLQuantizationType.Q4_1)
    return open_checkpoint(tmp_path)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [[int(t) for t in rng.integers(0, 250, rng.integers(1, 120))] for _ in range(count)]


def test_greedy_tokens_are_those_of_the_forward_pass(tiny: Checkpoint) -> None:
    prompt = prompts(1)[0]
    executor = Executor(tiny)
    expected = [int(executor.run({0: prompt}).argmax())]
    while len(expected) < 20:
        expected.append(int(executor.run({0: [expected[-1]]}).argmax()))
    with running(tiny) as engine:
        assert engine.generate([prompt], 20, flags=DescriptorFlag.IGNORE_EOS) == [expected]


@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_a_prompt_gives_the_same_tokens_alone_batched_chunked_and_preempted(
    tiny: Checkpoint, options: dict[str, float]
) -> None:
    every = prompts(10)
    with running(tiny) as engine:
        alone = [engine.generate([prompt], 60, **options)[0] for prompt in every]
        assert engine.counters["preemptions"] == 0
        assert engine.generate(every, 60, **options) == alone
    with running(tiny, max_batched_tokens=7) as engine:
        assert engine.generate(every, 60, **options) == alone
    with running(tiny, kv_pages=20) as engine:
        assert engine.generate(every, 60, **options) == alone
        assert engine.counters["preemptions"] > 0
        assert engine.counters["kv_pages_free"] == 20


def test_stop_ends_requests_and_the_loop(tiny: Checkpoint) -> None:
    with running(tiny) as engine:
        tag = engine.submit(0, [1, 2, 3], 200, flags=DescriptorFlag.IGNORE_EOS)
        wait_until(lambda: engine.counters["generated_tokens"] > 3)
        engine.order(Command.STOP)
        tokens, reason = engine.collect([tag])[tag]
        assert reason is FinishReason.SHUTDOWN
        assert len(tokens) < 200
        engine.thread.join(30)
        assert not engine.thread.is_alive()
        assert engine.failure is None
        assert engine.state is EngineState.DRAINING


def test_drain_finishes_what_runs_and_keeps_beating_until_stop(tiny: Checkpoint) -> None:
    with running(tiny) as engine:
        tag = engine.submit(0, [1, 2, 3], 100, flags=DescriptorFlag.IGNORE_EOS)
        wait_until(lambda: engine.counters["generated_tokens"] > 3)
        engine.order(Command.DRAIN)
        tokens, reason = engine.collect([tag])[tag]
        assert (len(tokens), reason) == (100, FinishReason.LENGTH)
        before = engine.heartbeat
        wait_until(lambda: engine.heartbeat > before)
        assert engine.thread.is_alive()


def test_an_exception_in_a_step_is_failed_in_the_ring_never_a_hang(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tiny) as engine:
        wait_until(lambda: engine.state is EngineState.READY)

        def broken(*_: object) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(engine.engine._forward, "run", broken)
        engine.submit(0, [1, 2, 3], 5)
        wait_until(lambda: not engine.thread.is_alive())
        assert engine.state is EngineState.FAILED
        assert isinstance(engine.failure, MemoryError)


def test_an_exception_while_getting_ready_is_failed_too(tiny: Checkpoint) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    engine = RunningEngine(tiny)
    with pytest.raises(ZeroDivisionError):
        engine.engine.run(broken)
    assert engine.state is EngineState.FAILED


def test_an_idle_engine_beats_and_uses_little_cpu(tiny: Checkpoint) -> None:
    with running(tiny) as engine:
        engine.generate([[1, 2, 3]], 5)
        time.sleep(0.1)  # past the eager looks
        beats, cpu, start = engine.heartbeat, time.process_time(), time.monotonic()
        wait_until(lambda: time.monotonic() - start > 0.5)
        used = (time.process_time() - cpu) / (time.monotonic() - start)
        assert engine.heartbeat - beats > 20
        assert used < 0.5  # spinning would take a whole core or more; the cost itself is measured in bench/


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"kv_pages": 15}, r"holds 240 tokens \(15 pages of 16\), one sequence needs 256"),
        ({"page_size": 8, "kv_pages": 512}, "page_size is 8, the cpu engine needs a multiple of 16"),
    ],
)
def test_limits_that_can_not_work_are_refused(tiny: Checkpoint, limits: dict[str, int], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        RunningEngine(tiny, **limits)


def test_the_kv_cache_takes_what_its_pages_need() -> None:
    config = tiny_config()
    assert page_bytes(config, 16) == 2 * 2 * 2 * 16 * 16 * 4
    assert KvCache(config, 5, 16).bytes == 5 * page_bytes(config, 16)
