"""Real processes that play bootstrap and gateway: each is told by a file what to do."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.cli import children
from services.cli.children import Child, Event, describe_exit
from services.cli.errors import CommandError
from services.cli.supervisor import Supervisor

PLAYER = """
import json, os, pathlib, signal, sys
from services.common.process import stop_with_parent
name, folder = sys.argv[-2], pathlib.Path(sys.argv[-1])
stops = {signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, stops)
stop_with_parent()

def log(event, **values):
    print(json.dumps({"event": event, **values}), file=sys.stderr, flush=True)

def note(word):
    with (folder / "history").open("a") as history:
        history.write(f"{name} {word}\\n")

if (folder / f"{name}.fails").exists():
    log("failed", level="error", error=f"{name} is broken")
    sys.exit(3)
note("starts")
print("noise of a library", file=sys.stderr)
log("ready" if name == "bootstrap" else "attached")
if (folder / f"{name}.stubborn").exists():
    while True:
        signal.sigwait(stops)
        note("ignores")
signal.sigwait(stops)
note("stops")
"""
LIMIT = 30.0


class Stage:
    def __init__(self, folder: Path, gateways: int = 2) -> None:
        self.folder = folder
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.shown: list[Event] = []
        self.said: list[str] = []
        self.bootstrap = self.child("bootstrap")
        self.gateways = [self.child(f"gateway-{number}") for number in range(gateways)]
        self.supervisor = Supervisor(self.bootstrap, self.gateways, self.events, self.shown.append, self.said.append)

    def child(self, name: str) -> Child:
        return Child(name, "player", [name, str(self.folder)], self.events)

    def history(self) -> list[str]:
        path = self.folder / "history"
        return path.read_text().splitlines() if path.exists() else []

    def run(self, script: Callable[[], None]) -> None:
        """Run until ``script``, which starts once everything serves, has ended."""

        def play() -> None:
            try:
                script()
            finally:
                self.supervisor.request_stop()

        self.supervisor.run(lambda: threading.Thread(target=play).start())

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, (self.history(), self.said)
            time.sleep(0.005)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    (tmp_path / "player.py").write_text(PLAYER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    monkeypatch.setattr(children, "FIRST_DELAY", 0.01)
    stage = Stage(tmp_path)
    yield stage
    stage.supervisor.stop(0)
    assert not [child.name for child in (stage.bootstrap, *stage.gateways) if child.alive]


def test_the_engine_starts_first_and_stops_last(stage: Stage) -> None:
    stage.run(lambda: None)
    stage.supervisor.stop(LIMIT)
    history = stage.history()
    assert history[0] == "bootstrap starts"
    assert history[-1] == "bootstrap stops"
    assert sorted(history[1:-1]) == sorted(f"gateway-{n} {word}" for n in (0, 1) for word in ("starts", "stops"))


def test_a_killed_gateway_is_started_again_and_nothing_else_is(stage: Stage) -> None:
    def script() -> None:
        pid = stage.gateways[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        stage.until(lambda: "gateway-1 is back" in stage.said)

    stage.run(script)
    assert stage.history().count("gateway-1 starts") == 2
    assert stage.history().count("gateway-0 starts") == stage.history().count("bootstrap starts") == 1
    assert any("gateway-1 ended (killed by SIGKILL); starting it again in 0.01 s" in line for line in stage.said)


def test_a_killed_engine_is_started_again_while_gateways_stay_up(stage: Stage) -> None:
    def script() -> None:
        pid = stage.bootstrap.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        stage.until(lambda: "bootstrap is back" in stage.said)

    stage.run(script)
    assert stage.history().count("bootstrap starts") == 2
    assert not [line for line in stage.history() if line.startswith("gateway") and line.endswith("stops")]


@pytest.mark.parametrize("name", ["bootstrap", "gateway-1"])
def test_what_fails_at_the_start_ends_the_start_with_its_own_words(stage: Stage, name: str) -> None:
    (stage.folder / f"{name}.fails").touch()
    with pytest.raises(CommandError, match=f"{name} did not start: {name} is broken"):
        stage.run(lambda: None)
    assert not [event for event in stage.shown if event.name == "failed"]  # one failure is one line


def test_what_does_not_drain_in_time_is_killed(stage: Stage) -> None:
    (stage.folder / "gateway-0.stubborn").touch()
    stage.run(lambda: None)
    stage.supervisor.stop(0.2)
    assert any(line.startswith("killing gateway-0") for line in stage.said)


def test_a_second_stop_kills_at_once(stage: Stage) -> None:
    (stage.folder / "gateway-0.stubborn").touch()
    (stage.folder / "bootstrap.stubborn").touch()
    stage.run(lambda: None)
    stage.supervisor.request_stop()
    started = time.monotonic()
    stage.supervisor.stop(LIMIT)
    assert time.monotonic() - started < LIMIT / 2
    assert any(line.startswith("killing gateway-0") for line in stage.said)
    assert "killing bootstrap" in stage.said


def test_restarts_are_put_off_further_and_further(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "FIRST_DELAY", 0.5)
    child = stage.child("gateway-9")
    child.start()
    assert [child.restart_delay() for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    monkeypatch.setattr(children, "STABLE_SECONDS", 0.0)
    assert child.restart_delay() == 0.5
    child.signal(signal.SIGKILL)
    assert stage.events.get(timeout=LIMIT).child is child


def test_a_line_that_is_no_event_is_shown_as_a_warning(stage: Stage) -> None:
    stage.run(lambda: None)
    noise = [event for event in stage.shown if event.name == "noise of a library"]
    assert len(noise) == 3
    assert noise[0].values == {"level": "warning"}


def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "player.py").write_text(PLAYER)
    program = f"""
import queue
from services.cli.children import Child
child = Child("gateway-0", "player", ["gateway-0", {str(tmp_path)!r}], events := queue.SimpleQueue())
child.start()
while events.get().name != "attached": pass
print(child.pid, flush=True)
events.get()
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    with psutil.Popen([sys.executable, "-c", program], stdout=-1, text=True, env=environment) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        psutil.wait_procs([child], timeout=LIMIT)
    assert (tmp_path / "history").read_text().splitlines() == ["gateway-0 starts", "gateway-0 stops"]


def test_exit_codes_in_words() -> None:
    assert [describe_exit(code) for code in (0, 70, -9, -99)] == [
        "exit code 0",
        "exit code 70",
        "killed by SIGKILL",
        "killed by signal 99",
    ]
