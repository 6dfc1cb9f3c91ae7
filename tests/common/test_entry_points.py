"""What every process does before anything else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNT_THREADS = """
import os, runpy, sys
import services.common.process
services.common.process.run_process = lambda *_: print("numpy" in sys.modules, len(os.listdir("/proc/self/task")))
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one CPU no library starts a pool")
@pytest.mark.parametrize("module", ["services.bootstrap", "services.dpu_gateway"])
def test_no_library_starts_a_thread_for_each_core_of_the_node(module: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_THREADS, module],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=environment,
        timeout=60,
    )
    assert done.stdout.split() == ["True", "1"]
