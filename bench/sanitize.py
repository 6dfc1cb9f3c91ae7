"""compute-sanitizer over a small model that a control loop serves: ``python -m bench.sanitize`` (make sanitize-gpu).

memcheck and racecheck over both loops: the one on the GPU (device-launched step graphs, the scheduling core as a thread
block) and the host-driven one (the same kernels in graphs that the host launches). Needs compute-sanitizer of CUDA 13:
of a CUDA toolkit, or the wheel nvidia-cuda-sanitizer-api (requirements/bench.txt). Whole logs go to a folder; exits
with 1 unless every check is clean.

racecheck does not support kernels that the GPU launches: steps that the loop launched never ended under it, and the
GPU failed. So it watches the loop alone, with products that are all Blink's own, because the tool breaks at cuBLASLt's
even where it doesn't watch them; what it says of other kernels there does not count. The step's kernels are watched
where the host launches them. There a smaller model and load keep the products short, whose accesses to shared memory
are the most.

Checked kernels run tens to thousands of times slower, so the load is one request of each kind (``asks``), and a run
without the sanitizer comes first: it shows that the load itself works, and leaves behind the compiled kernels and the
choices of matrix products, which would otherwise be made by measuring, thousands of launches, under the sanitizer. Each
answer is checked as in the soak.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.engine_process import SMALL_MODELS
from bench.families import RandomWeights
from bench.soak_requests import Answer, Ask, demand
from services.gpu_engine.cuda.assemble import SchedulerPlace
from services.gpu_engine.cuda.cublas_lt import CublasLt
from services.gpu_engine.cuda.kept_choices import KeptChoices
from services.gpu_engine.engine import EngineLimits
from services.gpu_engine.models.config import ModelConfig
from services.ring.schema import DescriptorFlag, FinishReason, RejectCode, record_bytes, submission_tag
from tests.gpu.model_serving import Client, serving_model

PROMPT, GENERATED = 40, 48  # the most of a request; no request has both
LIMITS = EngineLimits(
    context=64,
    page_size=16,
    kv_pages=6,  # fewer than all need together
    max_running=4,
    max_batched_tokens=16,  # five step graphs; longer prompts come in chunks
    max_waiting=16,
    lease_timeout_ms=600_000,
    prefix_cache=True,
)


@dataclass(frozen=True)
class Load:
    """What is served.

    Attributes:
        tokens: at most, of a request that is not cancelled.
        library: whether products may be cuBLASLt's.
    """

    model: ModelConfig
    tokens: int
    library: bool = True


TINY = SMALL_MODELS["tiny"]
LEAST = replace(TINY, layers=1, hidden=128, heads=2, kv_heads=1, ffn=128, vocabulary=256)
LOADS = {"usual": Load(TINY, 8), "brief": Load(LEAST, 3), "own": Load(LEAST, 3, library=False)}


@dataclass(frozen=True)
class Check:
    """A run under the sanitizer.

    Attributes:
        load: one of LOADS.
        kernel: what is watched; "" is everything.
        options: further ones of the sanitizer.
    """

    tool: str
    scheduler: SchedulerPlace
    load: str = "usual"
    kernel: str = ""
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.tool}, {self.scheduler} loop"


API_ERRORS = ("--report-api-errors", "no")  # of questions that are allowed to fail
CHECKS = (
    Check("memcheck", "gpu", options=API_ERRORS),
    Check("memcheck", "host", options=API_ERRORS),
    Check("racecheck", "gpu", "own", "control_loop"),
    Check("racecheck", "host", "brief"),
)
LOAD_SECONDS = 170.0
UNCHECKED_SECONDS = 30.0
FOUND = 9  # exit code of the sanitizer
PRINTED = 40  # findings; of those beyond it nothing is known
SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (.*)")
RACING = re.compile(r"=+ .*access at (.+)\+0x")  # the function: a kernel by its name, any other by its signature


def asks(vocabulary: int, tokens: int) -> list[Ask]:
    """Decode, chunked prefill, every sampling setting, penalties, alternatives, a cancel, a hostile record, a prompt
    that comes again.

    Args:
        tokens: at most, of those that are not cancelled.
    """
    rng = np.random.default_rng(0)

    def ask(length: int, most: int, **fields: Any) -> dict[str, Any]:
        prompt = rng.integers(1, vocabulary, length).tolist()
        return {"prompt": prompt, "max_tokens": most, "seed": length, "flags": DescriptorFlag.IGNORE_EOS, **fields}

    logprobs = DescriptorFlag.LOGPROBS | DescriptorFlag.IGNORE_EOS
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    long = ask(PROMPT, tokens, temperature=0.0, flags=logprobs, top_logprobs=20)
    return [
        Ask(ask(5, tokens, temperature=0.0)),
        Ask(long),
        Ask(ask(17, tokens, temperature=0.9, top_p=0.8)),
        Ask(ask(3, tokens, temperature=1.0, top_k=40, top_p=0.9, min_p=0.05, **penalties)),
        Ask(ask(33, tokens, temperature=0.7, stop_tokens=[5, 6], min_tokens=3, flags=DescriptorFlag(0), **penalties)),
        Ask(ask(8, GENERATED, temperature=1.0), cancel_after=2),
        Ask(ask(20, tokens, temperature=2.0, top_k=1, priority=2)),
        Ask(ask(4, tokens, top_p=math.nan), refused_with=RejectCode.BAD_SAMPLING),
        Ask(long),
    ]


def serve(scheduler: SchedulerPlace, load: Load) -> None:
    """What runs under the sanitizer. Raises SoakError."""
    vocabulary = load.model.vocabulary
    wanted = asks(vocabulary, load.tokens)
    with (
        nullcontext() if load.library else own_products(),
        serving_model(RandomWeights(load.model), LIMITS, scheduler=scheduler, slots=len(wanted)) as client,
    ):
        answers = answers_to(client, wanted, vocabulary)
    tokens, cancelled = sum(len(a.tokens) for a in answers), sum(a.reason is FinishReason.CANCELLED for a in answers)
    print(f"served {len(answers)} requests, {tokens} tokens, {cancelled} cancelled", flush=True)


@contextmanager
def own_products() -> Iterator[None]:
    """Engines made inside choose none of cuBLASLt's algorithms. Their steps must have few enough tokens."""
    with (
        patch.object(CublasLt, "candidates", return_value=[]),
        patch.object(KeptChoices, "get", return_value=None),
        patch.object(KeptChoices, "write"),
    ):
        yield


def answers_to(client: Client, wanted: Sequence[Ask], vocabulary: int) -> list[Answer]:
    """Send all requests at once and read them to their ends.

    Raises:
        SoakError: an answer that a request may not get, or no end.
    """
    lane, span = client.gateway.client, record_bytes(LIMITS.context, LIMITS.context)
    answers: dict[int, Answer] = {}
    for slot, ask in enumerate(wanted):
        position = lane.submit(ask.record(slot), slot * span)
        answers[submission_tag(position)] = Answer(ask, position, slot, vocabulary)
    deadline = time.monotonic() + LOAD_SECONDS
    while any(answer.reason is None for answer in answers.values()):
        demand(not client.ended(), "the engine has ended before its requests")
        demand(time.monotonic() < deadline, f"requests do not end within {LOAD_SECONDS:.0f} s", answers)
        lane.poll()
        for tag, _slot, kind, detail, token, value in lane.read_log().tolist():
            answer = answers[tag]
            answer.take(kind, token, value, detail)
            if len(answer.tokens) == answer.ask.cancel_after and not answer.cancelled:
                answer.cancelled = True
                lane.cancel(answer.slot, answer.position)
        lane.acknowledge()
        time.sleep(0.001)
    return list(answers.values())


@dataclass(frozen=True)
class Verdict:
    """How a check ended."""

    name: str
    clean: bool
    what: str
    seconds: float


def run(check: Check, sanitizer: str, logs: Path, limit: float) -> Verdict:
    options = [
        sanitizer,
        "--tool",
        check.tool,
        "--error-exitcode",
        str(FOUND),
        "--print-limit",
        str(PRINTED),
        *check.options,
    ]
    if check.kernel:
        options += ["--kernel-name", f"kns={check.kernel}"]
    log = logs / f"{check.tool}-{check.scheduler}.log"
    code, text, seconds = serve_apart(options, check.scheduler, check.load, log, limit)
    summaries, served = SUMMARY.findall(text), re.findall(r"^served .*", text, re.MULTILINE)
    what = "; ".join([*summaries, *served]) or text.strip().rsplit("\n", maxsplit=1)[-1][:100]
    if code is None:
        what = f"not done within {limit:.0f} s; {what}"
    racing = sorted(set(RACING.findall(text)))
    elsewhere = bool(racing) and all(name.isidentifier() and name != check.kernel for name in racing)
    elsewhere &= text.count("Race reported") < PRINTED
    if check.kernel and racing:
        what = f"hazards in {', '.join(name[:60] for name in racing)}; {what}"
    clean = code == 0 or (code == FOUND and bool(check.kernel) and elsewhere)
    return Verdict(check.name, clean and bool(summaries and served), what, seconds)


def serve_apart(before: list[str], scheduler: str, load: str, log: Path, limit: float) -> tuple[int | None, str, float]:
    """Run ``serve`` by way of a command. Returns its exit code, None if it had to be stopped, output and seconds."""
    began = time.monotonic()
    command = [*before, sys.executable, "-m", "bench.sanitize", "--serve", scheduler, load]
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True) as process,
    ):
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the sanitizer's session: itself and what it watches
            code = None
    return code, log.read_text(errors="replace"), time.monotonic() - began


def find_sanitizer() -> str:
    """Of the PATH, a CUDA toolkit or a wheel. Exits when there is none."""
    import nvidia  # noqa: PLC0415 (the wheels' namespace)

    folders = [
        *os.environ["PATH"].split(os.pathsep),
        "/usr/local/cuda/bin",
        *(f"{p}/cu13/bin" for p in nvidia.__path__),
    ]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if found is None:
        sys.exit("compute-sanitizer is missing: install a CUDA toolkit or the wheel nvidia-cuda-sanitizer-api")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="*", default=sorted({check.tool for check in CHECKS}))
    parser.add_argument("--schedulers", nargs="*", default=["gpu", "host"])
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "blink-sanitizer")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of one check")
    parser.add_argument("--serve", nargs=2, metavar=("SCHEDULER", "LOAD"), help="only serve, without a sanitizer")
    arguments = parser.parse_args()
    if arguments.serve:
        scheduler, load = arguments.serve
        serve(scheduler, LOADS[load])
        return
    checks = [check for check in CHECKS if check.tool in arguments.tools and check.scheduler in arguments.schedulers]
    if not checks:
        sys.exit(f"no check of {arguments.tools} with {arguments.schedulers}: there are {[c.name for c in CHECKS]}")
    sanitizer = find_sanitizer()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    print(f"{sanitizer}, logs in {arguments.logs}", flush=True)
    for scheduler, load in dict.fromkeys((check.scheduler, check.load) for check in checks):
        log = arguments.logs / f"alone-{scheduler}-{load}.log"
        code, text, seconds = serve_apart([], scheduler, load, log, UNCHECKED_SECONDS)
        if code != 0:
            sys.exit(f"the load does not end well without the sanitizer either ({code}):\n{text[-3000:]}")
        print(f"without the sanitizer, {scheduler} loop, {load} load: {seconds:.0f} s", flush=True)
    print("\n| check | clean | what | s |\n|---|---|---|---|", flush=True)
    clean = True
    for check in checks:
        verdict = run(check, sanitizer, arguments.logs, arguments.limit)
        clean &= verdict.clean
        answer = "yes" if verdict.clean else "no"
        print(f"| {verdict.name} | {answer} | {verdict.what} | {verdict.seconds:.0f} |", flush=True)
    sys.exit(not clean)


if __name__ == "__main__":
    main()
