"""Programs that a test starts and ends, each with a log of its own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

STOP_SECONDS = 20.0
LOG_CHARACTERS = 4_000
_TOGETHER = ("setpriv", "--pdeathsig", "KILL", "--") if shutil.which("setpriv") else ()


ENDED = 128 + signal.SIGTERM


def end_by_sigterm(end: Callable[[], object] = lambda: sys.exit(ENDED)) -> None:
    """Have SIGTERM end this program as an error does: what cleans up after it, cleans up."""

    def told(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        end()

    signal.signal(signal.SIGTERM, told)


class Processes:
    """Their logs lie in ``directory``, which is also where they run.

    A signal to the process group of the tests is not theirs, as the tests end them in order; but when the tests are
    killed, they are, too.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str | Path]) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*_TOGETHER, *(str(c) for c in command)], stdout=log, stderr=log, cwd=self.directory, process_group=0
            )

    def signal(self, name: str, number: int) -> None:
        self._running[name].send_signal(number)

    def end(self, name: str) -> None:
        """SIGTERM, and SIGKILL when that does not help. Nothing where there is no such process."""
        process = self._running.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def end_all(self) -> None:
        """The last one first."""
        for name in reversed(list(self._running)):
            self.end(name)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")[-LOG_CHARACTERS:]

    def until(self, what: str, holds: Callable[[], bool], seconds: float) -> None:
        """Wait for it. Fails with the logs when a process ends or the time is over."""
        end = time.monotonic() + seconds
        while not holds():
            for name, process in self._running.items():
                assert process.poll() is None, f"{name} ended:\n{self.log(name)}"
            if time.monotonic() > end:
                logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in self._running)
                raise AssertionError(f"not after {seconds:g} s: {what}\n{logs}")
            time.sleep(0.2)
