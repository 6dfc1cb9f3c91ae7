"""All GPU tests in one go: ``python -m bench.verify_gpu`` (make verify-gpu), on a machine with a GPU.

Most of their time is work of the host, so groups of tests run beside each other, as many as there are processors; those
that keep a control loop on the GPU run one after the other when these are done. Each group has a time limit, and so has
the whole. One line a group as it ends, and one a failure; then a summary in Markdown, also written to --out. Exits with
1 unless every test passed.

Kernels come from --cache, which bench.prebuild fills; what is missing there is compiled. The folder is this command's
own because choices that tests measure beside each other must not become anybody's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu_groups import PYTEST, Group, lone_groups, parallel_groups
from bench.machine import Machine
from services.bootstrap.store.store import default_model_dir

ROOT = Path(__file__).parents[1]
CACHE = ROOT / "build" / "cache"
SHOWN = 160  # characters of a reason in a line
OUTCOMES = ("passed", "failed", "skipped")


@dataclass
class Result:
    """How a group ended.

    Attributes:
        ended: what became of each test, by its name: one of OUTCOMES, or "begun".
        reasons: of failures and skips, the first first.
        stopped: why it did not come to its end; "" when it did.
        log: all that pytest printed; when it was stopped, then the failures that it had yet to print.
    """

    group: Group
    seconds: float = 0.0
    ended: dict[str, str] = field(default_factory=dict)
    reasons: list[tuple[str, str]] = field(default_factory=list)
    stopped: str = ""
    log: str = ""

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.ended.values())

    @property
    def good(self) -> bool:
        return not self.stopped and not self.counts["failed"] and self.counts["passed"] > 0

    def take(self, lines: Sequence[str]) -> None:
        """What bench.gpu_reports wrote; a test that has failed once stays so."""
        for line in lines:
            report = json.loads(line)
            test, outcome = report["test"], report["outcome"]
            if self.ended.get(test) != "failed":
                self.ended[test] = outcome
            if outcome in ("failed", "skipped"):
                self.reasons.append((outcome, f"{test.rpartition('::')[2]}: {report['why']}"))
            if self.stopped and report.get("text"):
                self.log += f"\n{'_' * 20} {test}\n{report['text']}\n"

    @property
    def failures(self) -> list[str]:
        """Test and reason of each."""
        return [why for outcome, why in self.reasons if outcome == "failed"]

    def reason(self) -> str:
        """The first failure; else why it stopped; else the first skip."""
        begun = [test.rpartition("::")[2] for test, outcome in self.ended.items() if outcome == "begun"]
        stopped = [self.stopped + "".join(f", in {test}" for test in begun)] if self.stopped else []
        return next(iter([*self.failures, *stopped, *(why for _, why in self.reasons)]), "")

    def cells(self) -> list[str]:
        counts = [str(self.counts[outcome]) for outcome in OUTCOMES]
        return [self.group.name, "yes" if self.good else "NO", *counts, f"{self.seconds:.0f}", self.reason()]


def run(group: Group, environment: dict[str, str], deadline: float) -> Result:
    """Run a group in a process of its own, at most until ``deadline`` of time.monotonic."""
    result, began = Result(group), time.monotonic()
    limit = min(group.seconds, deadline - began)
    if limit < 1.0:
        result.stopped = "not begun: no time was left"
        return result
    with tempfile.TemporaryDirectory() as scratch:
        reports, log = Path(scratch) / "reports", Path(scratch) / "log"
        options = ["-p", "bench.gpu_reports", "--reports", str(reports), "--share", f"{group.share}/{group.shares}"]
        options += ["-q", "-p", "no:cacheprovider", "--basetemp", f"{scratch}/tmp"]
        command = [sys.executable, *PYTEST, *options, str(group.file)]
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its session: pytest, and engines that it started
                process.wait()
                result.stopped, code = f"stopped after {limit:.0f} s", 0
        result.log = log.read_text(errors="replace")
        if reports.exists():
            result.take(reports.read_text().splitlines())
        if code not in (0, 1, 5):  # 5: the share has no tests
            tail = " ".join(result.log.split())[-SHOWN:]
            result.stopped = f"pytest ended with {code}: {tail}"
    result.seconds = time.monotonic() - began
    return result


def run_all(cache: Path, seconds: float, processes: int, wanted: Sequence[str]) -> Iterator[Result]:
    """Run the groups of files that ``wanted`` names, all if it is empty."""
    deadline = time.monotonic() + seconds
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "BLINK_MODEL_DIR": str(default_model_dir())}
    # One thread each: there are as many processes as processors.
    single = environment | {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    with ThreadPoolExecutor(processes) as pool:
        jobs = [pool.submit(run, group, single, deadline) for group in chosen(parallel_groups(), wanted)]
        for job in as_completed(jobs):
            yield job.result()
    for group in chosen(lone_groups(), wanted):
        yield run(group, environment, deadline)


def chosen(groups: Iterable[Group], wanted: Sequence[str]) -> list[Group]:
    return [group for group in groups if not wanted or group.file.stem in wanted]


def summary(results: Sequence[Result], seconds: float, compiled: int) -> str:
    machine, total = Machine.of_this(), Counter[str]()
    for result in results:
        total.update(result.counts)
    head = ["group", "good", *OUTCOMES, "s", "first failure, or first skip"]
    rows = [head, ["---"] * len(head), *(result.cells() for result in sorted(results, key=lambda r: r.group.name))]
    verdict = "All passed" if all(result.good for result in results) else "NOT ALL PASSED"
    return (
        f"# GPU tests\n\n`make verify-gpu`, {time.strftime('%Y-%m-%d')}, commit {machine.commit}, on {machine.gpu},"
        f" driver {machine.driver}, {machine.cpus}.\n\n{verdict}: {total['passed']} passed, {total['failed']} failed,"
        f" {total['skipped']} skipped in {seconds:.0f} s; {compiled} kernels were compiled on the way.\n\n"
        + "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=CACHE, help="default: build/cache")
    parser.add_argument("--seconds", type=float, default=150.0, help="of the whole")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu-verification.md")
    parser.add_argument("--log", type=Path, default=ROOT / "build" / "gpu-failures.log", help="of groups that failed")
    files = sorted({group.file.stem for group in (*parallel_groups(), *lone_groups())})
    parser.add_argument("--only", nargs="*", default=[], choices=files, help="files to run; no report is written then")
    arguments = parser.parse_args()
    cache = arguments.cache.resolve()

    def kernels() -> int:
        return len(list((cache / "blink" / "kernels").glob("*.cubin")))

    before, began = kernels(), time.monotonic()
    results: list[Result] = []
    arguments.log.write_text("")
    for result in run_all(cache, arguments.seconds, arguments.processes, arguments.only):
        results.append(result)
        if not result.good:
            with arguments.log.open("a") as log:
                log.write(f"\n{'=' * 20} {result.group.name}\n{result.log}")
        name, good, passed, failed, skipped, taken, reason = result.cells()
        counts = f"{passed:>4} passed {failed:>3} failed {skipped:>3} skipped"
        print(f"{'ok  ' if good == 'yes' else 'FAIL'} {name:28} {counts} {taken:>4} s  {reason[:SHOWN]}", flush=True)
        for failure in result.failures:
            print(f"     {failure}", flush=True)
    text = summary(results, time.monotonic() - began, kernels() - before)
    if not arguments.only:
        arguments.out.write_text(text)
    print(f"\n{text}")
    sys.exit(not all(result.good for result in results))


if __name__ == "__main__":
    main()
