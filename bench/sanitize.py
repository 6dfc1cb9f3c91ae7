"""compute-sanitizer over a small model that both control loops serve: ``python -m bench.sanitize``.

memcheck and racecheck, each over the loop on the GPU (device-launched step graphs, the scheduling core as a thread
block) and over the host-driven one (the same kernels in graphs that the host launches). Needs compute-sanitizer of
CUDA 13: of a CUDA toolkit, or the wheel nvidia-cuda-sanitizer-api (requirements/bench.txt). Whole logs go to a folder;
exits with 1 unless every check is clean.

The load is two dozen requests of random sampling settings, a hostile one among them; each answer is checked as in the
soak.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.engine_process import SMALL_MODELS
from bench.families import RandomWeights
from bench.soak_requests import Answer, Asker
from services.gpu_engine.cuda.assemble import SchedulerPlace
from services.gpu_engine.engine import EngineLimits
from services.ring.schema import record_bytes, submission_tag
from tests.gpu.model_serving import Client, serving_model

TOOLS = ("memcheck", "racecheck")
REQUESTS, PROMPT, GENERATED = 24, 90, 10
SEED = 0  # among its first requests are a hostile one, repeats, and every sampling setting
LIMITS = EngineLimits(
    context=PROMPT + GENERATED + 1,
    page_size=16,
    kv_pages=24,  # fewer than all need together: some wait, some are preempted
    max_running=8,
    max_batched_tokens=64,
    max_waiting=64,
    lease_timeout_ms=600_000,
)
LOAD_SECONDS = 200.0
FOUND = 9  # exit code of the sanitizer
SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (.*)")


def serve(scheduler: SchedulerPlace) -> None:
    """What runs under the sanitizer. Raises SoakError."""
    weights = RandomWeights(SMALL_MODELS["tiny"])
    with serving_model(weights, LIMITS, scheduler=scheduler, slots=REQUESTS) as client:
        answers = load(client, weights.config.vocabulary)
    tokens = sum(len(answer.tokens) for answer in answers)
    print(f"served {len(answers)} requests, {tokens} tokens", flush=True)


def load(client: Client, vocabulary: int) -> list[Answer]:
    """All requests at once, to their ends."""
    lane, asker, span = client.gateway.client, Asker(SEED, vocabulary), record_bytes(PROMPT, GENERATED)
    answers: dict[int, Answer] = {}
    for slot in range(REQUESTS):
        ask = asker.ask()
        fields = ask.fields
        fields.pop("time_limit_ms", None)
        fields["prompt"] = fields["prompt"][:PROMPT]
        fields["max_tokens"] = min(fields["max_tokens"], GENERATED)
        fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
        position = lane.submit(ask.record(slot), slot * span)
        answers[submission_tag(position)] = Answer(ask, position, slot, vocabulary)
    deadline = time.monotonic() + LOAD_SECONDS
    while any(answer.reason is None for answer in answers.values()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"requests do not end within {LOAD_SECONDS:.0f} s: {answers}")
        lane.poll()
        for tag, _slot, kind, detail, token, value in lane.read_log().tolist():
            answers[tag].take(kind, token, value, detail)
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


def check(sanitizer: str, tool: str, scheduler: str, logs: Path, limit: float) -> Verdict:
    log = logs / f"{tool}-{scheduler}.log"
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "40"]
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    command += [sys.executable, "-m", "bench.sanitize", "--serve", scheduler]
    began = time.monotonic()
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True) as process,
    ):
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the sanitizer's session: itself and what it watches
            code = None
    text = log.read_text(errors="replace")
    summaries, served = SUMMARY.findall(text), re.findall(r"^served .*", text, re.MULTILINE)
    what = "; ".join([*summaries, *served]) or text.strip().rsplit("\n", maxsplit=1)[-1][:100]
    if code is None:
        what = f"not done within {limit:.0f} s; {what}"
    return Verdict(
        f"{tool}, {scheduler} loop", code == 0 and bool(summaries and served), what, time.monotonic() - began
    )


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
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--schedulers", nargs="*", choices=("gpu", "host"), default=["gpu", "host"])
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "blink-sanitizer")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of one check")
    parser.add_argument("--serve", choices=("gpu", "host"), help="only serve the load, without a sanitizer")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    sanitizer = find_sanitizer()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    print(f"{sanitizer}, logs in {arguments.logs}\n\n| check | clean | what | s |\n|---|---|---|---|", flush=True)
    clean = True
    for tool, scheduler in itertools.product(arguments.tools, arguments.schedulers):
        verdict = check(sanitizer, tool, scheduler, arguments.logs, arguments.limit)
        clean &= verdict.clean
        answer = "yes" if verdict.clean else "no"
        print(f"| {verdict.name} | {answer} | {verdict.what} | {verdict.seconds:.0f} |", flush=True)
    sys.exit(not clean)


if __name__ == "__main__":
    main()
