"""Compiles, without a GPU, what GPU tests and benches will ask for: ``python -m bench.prebuild FOLDER``.

FOLDER is then a cache of kernels for bench.verify_gpu, or for anything else with XDG_CACHE_HOME two folders above it.
Which builds those are is found by running the tests up to their first launches (bench/dry_gpu.py) and from the benches'
models (bench/kernel_builds.py). A build that is missing is compiled where it is wanted: that costs time alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from bench.gpu_groups import PYTEST, beside_each_other
from bench.kernel_builds import Build, bench_builds, other_builds
from services.gpu_engine.cuda.errors import KernelBuildError

ROOT = Path(__file__).parents[1]
COLLECT_SECONDS = 300.0


def builds_of_tests(tests: Sequence[Path]) -> list[Build]:
    """What they compile before their first launches."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "builds"
        command = [sys.executable, *PYTEST, "-p", "bench.dry_gpu", "--builds", str(file), *map(str, tests)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=COLLECT_SECONDS, check=False)
        if not file.exists():
            sys.exit(f"the tests ask for no build:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
        return [Build.from_json(json.loads(line)) for line in file.read_text().splitlines()]


def compile_one(build: Build, arch: str, cache: Path) -> tuple[Build, float, str]:
    began = time.monotonic()
    try:
        build.compile(arch, cache)
    except KernelBuildError as error:
        return build, time.monotonic() - began, str(error)
    return build, time.monotonic() - began, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=("tests", "benches"), help="default: both")
    arguments = parser.parse_args()
    builds = dict.fromkeys(other_builds())
    if arguments.only != "benches":
        builds |= dict.fromkeys(builds_of_tests(beside_each_other()))
    if arguments.only != "tests":
        builds |= dict.fromkeys(bench_builds())
    print(f"{len(builds)} builds for {arguments.arch}", flush=True)
    began, spent, failed = time.monotonic(), 0.0, 0
    with ProcessPoolExecutor(arguments.processes) as pool:
        jobs = [pool.submit(compile_one, build, arguments.arch, arguments.folder.resolve()) for build in builds]
        for done, job in enumerate(as_completed(jobs), 1):
            build, seconds, error = job.result()
            spent += seconds
            failed += bool(error)
            if error or seconds > 1.0:
                what = f"{'FAILED' if error else f'{seconds:5.1f} s'} {' '.join(build.sources)} {dict(build.defines)}"
                print(f"{done:4}/{len(builds)} {what}\n{error}".rstrip(), flush=True)
    print(f"{spent:.0f} s of compiling in {time.monotonic() - began:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
