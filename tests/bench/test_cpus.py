"""Moving a process: all of its threads go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.cpus import move_process

THREADS = """
import threading
for _ in range(4):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
input()
"""


def test_every_thread_of_a_process_moves() -> None:
    cpu = max(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        move_process(process.pid, {cpu})
        tasks = [int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()]
        assert len(tasks) >= 5
        assert all(os.sched_getaffinity(task) == {cpu} for task in tasks)
        process.communicate(b"\n")
