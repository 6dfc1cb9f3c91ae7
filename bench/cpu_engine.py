"""The cpu engine against llama.cpp: same GGUF, same threads, taken in turns in one run.

    pip install --require-hashes --no-deps -r requirements/bench.txt
    python bench/cpu_engine.py [--model FILE] [--threads 2] [--rounds 5]

Blink is measured through its ring, control loop included; llama.cpp by its own server's timings (xllamacpp). Each lives
in a process of its own and sleeps while the other is measured. Decode rates count tokens after each stream's first; the
best of the rounds is printed, because other work on the machine only ever slows a round down. The greedy tokens of this
build are compared with the goldens first: a rate without that means nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from services.gpu_engine.models.loader import open_checkpoint
from services.ring.schema import DescriptorFlag
from tests.gpu_engine.cpu.running import RunningEngine

DEFAULT_MODEL = Path.home() / ".cache" / "blink" / "models" / "smollm2-135m-instruct"
GOLDENS = Path(__file__).parents[1] / "tests" / "gpu_engine" / "cpu" / "goldens.json"
CONTEXT, PAGE_SIZE = 2048, 16
DECODE_PROMPT, DECODE_TOKENS, PREFILL_TOKENS = 16, 96, 512
STREAMS = (1, 2, 4, 8, 16)

Measure = Callable[..., Any]


def blink(model: Path, threads: int) -> Measure:
    """Answers ("decode", streams), ("prefill",), ("idle",), ("check",)."""
    checkpoint = open_checkpoint(model)
    started = time.perf_counter()
    engine = RunningEngine(
        checkpoint,
        threads=threads,
        context=CONTEXT,
        page_size=PAGE_SIZE,
        kv_pages=16 * CONTEXT // PAGE_SIZE,
        max_batched_tokens=512,
        lease_timeout_ms=600_000,
    )
    engine.start()
    load_seconds = time.perf_counter() - started
    seed = iter(range(1 << 30))

    def prompt(length: int) -> list[int]:
        base = next(seed)
        return [100 + (base * 7919 + i * 104729) % 40_000 for i in range(length)]

    def decode(streams: int) -> float:
        tags = [
            engine.submit(slot, prompt(DECODE_PROMPT), DECODE_TOKENS, flags=DescriptorFlag.IGNORE_EOS)
            for slot in range(streams)
        ]
        times = engine.times(tags)
        start = max(t[0] for t in times)
        end = max(t[-1] for t in times)
        return sum(sum(1 for moment in t if moment > start) for t in times) / (end - start)

    def prefill() -> float:
        begin = time.perf_counter()
        tag = engine.submit(0, prompt(PREFILL_TOKENS), 1)
        return PREFILL_TOKENS / (engine.times([tag])[0][0] - begin)

    def idle() -> dict[str, float]:
        time.sleep(0.5)
        cpu, begin = time.process_time(), time.perf_counter()
        time.sleep(2.0)
        share = (time.process_time() - cpu) / (time.perf_counter() - begin)
        return {"cpu_percent": 100 * share, "load_seconds": load_seconds}

    def check() -> tuple[int, int]:
        goldens = json.loads(GOLDENS.read_text())["goldens"]
        equal = clear = 0
        outputs = engine.generate([g["prompt"] for g in goldens], 32, flags=DescriptorFlag.IGNORE_EOS)
        for golden, output in zip(goldens, outputs, strict=True):
            for token, want, margin in zip(output, golden["tokens"], golden["margins"], strict=True):
                if margin <= 0.05 and token != want:
                    break  # the sequences may part here
                clear += margin > 0.05
                equal += margin > 0.05 and token == want
        return equal, clear

    measures: dict[str, Measure] = {"decode": decode, "prefill": prefill, "idle": idle, "check": check}
    return lambda task, *parameters: measures[task](*parameters)


def llama_cpp(model: Path, threads: int) -> Measure:
    """Answers ("decode", 1) and ("prefill",)."""
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(next(model.glob("*.gguf")) if model.is_dir() else model)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_ctx, params.n_parallel = CONTEXT, 1
    server = xllamacpp.Server(params)
    seed = iter(range(1 << 30))

    def complete(prompt_tokens: int, tokens: int) -> dict[str, float]:
        base = next(seed)
        prompt = [100 + (base * 7919 + i * 104729) % 40_000 for i in range(prompt_tokens)]
        options = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions({"prompt": prompt, "timings_per_token": True} | options)
        timings: dict[str, float] = answer["timings"]
        return timings

    def measure(task: str, *_: int) -> float:
        if task == "decode":
            return complete(DECODE_PROMPT, DECODE_TOKENS)["predicted_per_second"]
        return complete(PREFILL_TOKENS, 1)["prompt_per_second"]

    return measure


def serve(build: Callable[[Path, int], Measure], model: Path, threads: int, pipe: Connection) -> None:
    """A measured process: builds its engine, then answers one task at a time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # engines log there
    measure = build(model, threads)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        pipe.send(measure(*task))
    os._exit(0)


class Peer:
    """One measured process."""

    def __init__(self, build: Callable[[Path, int], Measure], model: Path, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(build, model, threads, theirs), daemon=True)
        self._process.start()
        self._pipe.recv()

    def ask(self, *task: Any) -> Any:
        self._pipe.send(task)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ours, theirs = (Peer(build, options.model, options.threads) for build in (blink, llama_cpp))
    equal, clear = ours.ask("check")
    print(f"greedy tokens equal to the fp32 goldens where their margin is clear: {equal} of {clear}")
    rates: dict[tuple[str, int], float] = {}

    def keep(key: tuple[str, int], rate: float) -> None:
        rates[key] = max(rates.get(key, 0.0), rate)

    for _ in range(options.rounds):
        keep(("llama.cpp", 1), theirs.ask("decode", 1))
        for streams in STREAMS:
            keep(("blink", streams), ours.ask("decode", streams))
        keep(("llama.cpp", 0), theirs.ask("prefill"))
        keep(("blink", 0), ours.ask("prefill"))
    idle = ours.ask("idle")
    for peer in (ours, theirs):
        peer.close()
    single = rates["llama.cpp", 1]
    print(f"\n{options.threads} threads, best of {options.rounds} rounds\n")
    print("| what | tokens/s | of llama.cpp |\n|---|---|---|")
    print(f"| llama.cpp, 1 stream | {single:.0f} | 1.00 |")
    for streams in STREAMS:
        rate = rates["blink", streams]
        print(f"| blink, {streams} stream{'s'[: streams > 1]} | {rate:.0f} | {rate / single:.2f} |")
    print(f"| llama.cpp, prefill of {PREFILL_TOKENS} | {rates['llama.cpp', 0]:.0f} | 1.00 |")
    ratio = rates["blink", 0] / rates["llama.cpp", 0]
    print(f"| blink, prefill of {PREFILL_TOKENS} | {rates['blink', 0]:.0f} | {ratio:.2f} |")
    print(f"\nidle: {idle['cpu_percent']:.2f}% of one CPU; loaded in {idle['load_seconds']:.2f} s")


if __name__ == "__main__":
    main()
