from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
from typing import ClassVar
from pydantic import Field
from services.common.errors import BlinkError
from services.common.process import run_process
from services.common.settings import ProcessSettings

class Settings(ProcessSettings):
    process: ClassVar[str] = "bootstrap"
    lanes: int = Field(1, ge=1, le=4)

def main(settings):
    if settings.lanes == 2:
        raise BlinkError("lane 2 is broken")
    if settings.lanes == 3:
        raise RuntimeError("a fault of ours")
    return 0

run_process(Settings, main)
"""


def run(*flags: str) -> tuple[int, list[dict[str, object]]]:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *flags], capture_output=True, text=True, check=False, cwd=root, timeout=60
    )
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


def test_a_good_run_prints_its_settings_as_one_event() -> None:
    code, (event,) = run("--lanes", "4")
    assert (code, event["event"], event["lanes"], event["role"]) == (0, "settings", 4, "bootstrap")


def test_a_bad_setting_is_one_line_and_exit_code_2() -> None:
    code, (event,) = run("--lanes", "5")
    assert code == 2
    assert "lanes is '5'" in str(event["error"])


def test_a_failure_is_one_line_and_a_non_zero_exit_code() -> None:
    code, (_, event) = run("--lanes", "2")
    assert (code, event["error"]) == (1, "lane 2 is broken")


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    code, (_, event) = run("--lanes", "3")
    assert code == 70
    assert event["exception"]


CHILD = """
import signal
from services.common.process import stop_with_parent
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
stop_with_parent()
print("started", flush=True)
signal.sigwait({signal.SIGTERM})
print("told to stop", flush=True)
"""
PARENT = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", {CHILD!r}], env={{**os.environ, "BLINK_PARENT_PID": str(os.getpid())}})
sys.stdin.read()
"""


def test_a_child_is_told_to_stop_when_its_parent_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        parent.kill()
        assert parent.stdout.readline() == "told to stop\n"


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "BLINK_PARENT_PID": "1"},
        timeout=60,
    )
    assert done.returncode == 1
    assert "already ended" in done.stderr


def test_a_thread_that_is_still_in_native_code_is_left_in_peace_at_the_end(tmp_path: Path) -> None:
    at_exit = tmp_path / "shutdown"
    program = f"""
import atexit, pathlib, threading
atexit.register(pathlib.Path({str(at_exit)!r}).touch)
threading.Thread(target=threading.Event().wait, daemon=True).start()
{PROGRAM}
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "--lanes=2"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], timeout=60,
    )  # fmt: skip
    assert (done.returncode, json.loads(done.stderr.splitlines()[-1])["event"]) == (1, "failed")
    assert not at_exit.exists()  # the interpreter's shutdown, which would free what the thread uses, did not run
