"""The bootstrap process, with the stand-in engine and a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from blink.v1 import bootstrap_pb2, bootstrap_pb2_grpc

from services.common.runtime import ring_path
from services.ring.header import read_ring_info
from services.ring.lane import LaneClient
from services.ring.schema import ABI_VERSION, LAYOUT_HASH
from services.ring.shm import ShmTransport
from tests.gpu_engine.models.tiny import random_weights, tiny_config, write_gguf

LIMIT = 60


class Bootstrap:
    """One run of the process under an instance name of its own."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.instance = f"t-{uuid.uuid4().hex[:12]}"
        self.directory = directory
        self.model = model
        self.processes: list[subprocess.Popen[str]] = []

    @property
    def ring(self) -> Path:
        return ring_path(self.instance)

    @property
    def socket(self) -> Path:
        return self.directory / f"bootstrap-{self.instance}.sock"

    def start(self, *flags: str, fault: str = "", moved: bool = False) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.bootstrap.stand_in_host", f"--instance={self.instance}"]
        environment = {**os.environ, "BLINK_RUNTIME_DIR": str(self.directory), "BLINK_TEST_FAULT": fault}
        if moved:
            environment["BLINK_TEST_MOVED"] = "1"
        process = subprocess.Popen(
            [*command, f"--model={self.model}", *flags], stderr=subprocess.PIPE, text=True, env=environment
        )
        self.processes.append(process)
        return process

    def until(self, process: subprocess.Popen[str], name: str) -> dict[str, Any]:
        """Read the process's events up to one of this name."""
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
            seen.append(event)
        raise AssertionError(f"no {name} among {seen}")

    def end(self, process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]]]:
        """Wait for the end; exit code and the events not read yet."""
        _, rest = process.communicate(timeout=LIMIT)
        return process.returncode, [json.loads(line) for line in rest.splitlines()]

    @property
    def status(self) -> Path:
        return self.directory / f"status-{self.instance}.sock"

    def left_behind(self) -> list[Path]:
        return [path for path in (self.ring, self.socket, self.status) if path.exists()]

    def probe(self) -> subprocess.CompletedProcess[str]:
        """As a container's probe looks at it."""
        own = {"BLINK_RUNTIME_DIR": str(self.directory), "BLINK_BOOTSTRAP_INSTANCE": self.instance}
        command = [sys.executable, "-m", "services.bootstrap.probe"]
        return subprocess.run(command, env=os.environ | own, stderr=subprocess.PIPE, text=True, check=False)

    def attach(self, gateway_id: str = "test/0") -> bootstrap_pb2.AttachResponse:
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            request = bootstrap_pb2.AttachRequest(
                gateway_id=gateway_id, abi_version=ABI_VERSION, layout_hash=LAYOUT_HASH
            )
            return bootstrap_pb2_grpc.BootstrapStub(channel).Attach(request, timeout=LIMIT)


@pytest.fixture
def bootstrap(tmp_path: Path) -> Iterator[Bootstrap]:
    model = tmp_path / "tiny.gguf"
    config = tiny_config()
    write_gguf(model, config, random_weights(config))
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    bootstrap = Bootstrap(runtime, model)
    yield bootstrap
    for process in bootstrap.processes:
        process.kill()
        process.communicate()
    bootstrap.ring.unlink(missing_ok=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_serves_a_lane_and_leaves_nothing_behind(bootstrap: Bootstrap, number: signal.Signals) -> None:
    process = bootstrap.start()
    ready = bootstrap.until(process, "ready")
    assert (ready["model"], ready["engine"], ready["max_context_tokens"]) == ("tiny", "cpu", 256)
    assert bootstrap.ring.stat().st_mode & 0o777 == 0o600
    grant = bootstrap.attach()
    assert grant.engine_epoch == ready["engine_epoch"]
    assert grant.model.name == "tiny"
    transport = ShmTransport(grant.shm.path)
    info = read_ring_info(transport, expected_fingerprint=bytes.fromhex(grant.model.fingerprint))
    lane = LaneClient(
        transport, info.geometry, grant.lane, gateway_epoch=grant.gateway_epoch, lease_timeout=grant.lease_timeout_ms
    )
    lane.attach(timeout=LIMIT)
    assert bootstrap.attach("test/1").lane != grant.lane
    process.send_signal(number)
    code, events = bootstrap.end(process)
    assert (code, events[-1]["event"]) == (0, "stopped")
    assert bootstrap.left_behind() == []


def test_loading_is_reported_from_nothing_to_everything(bootstrap: Bootstrap) -> None:
    process = bootstrap.start()
    first = bootstrap.until(process, "loading")
    assert (first["stage"], first["done"], first["total"]) == ("weights", 0, 100)
    assert bootstrap.until(process, "loading")["done"] == 100
    bootstrap.until(process, "ready")


def test_parked_its_main_thread_never_runs(bootstrap: Bootstrap) -> None:
    process = bootstrap.start()
    bootstrap.until(process, "ready")
    bootstrap.attach()
    main_thread = Path(f"/proc/{process.pid}/task/{process.pid}")

    def switches() -> list[str]:
        return [line for line in (main_thread / "status").read_text().splitlines() if "ctxt_switches" in line]

    before = switches()
    for number in range(20):
        bootstrap.attach(f"test/{number % 4}")
    assert switches() == before
    assert (main_thread / "stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("moved", [False, True], ids=["in shared memory", "where bootstrap alone reaches it"])
def test_the_probe_is_told_how_the_ring_stands_wherever_it_lies(bootstrap: Bootstrap, moved: bool) -> None:
    process = bootstrap.start(moved=moved)
    bootstrap.until(process, "ready")
    done = bootstrap.probe()
    assert (done.returncode, done.stderr) == (0, "")
    process.kill()
    bootstrap.end(process)
    done = bootstrap.probe()
    assert (done.returncode, "is the engine running?" in done.stderr) == (1, True)


@pytest.mark.parametrize("moved", [False, True], ids=["in shared memory", "where bootstrap alone reaches it"])
def test_a_control_loop_that_stands_still_fails_the_probe(bootstrap: Bootstrap, moved: bool) -> None:
    bootstrap.until(bootstrap.start(fault="still", moved=moved), "ready")
    done = bootstrap.probe()
    assert (done.returncode, "its heartbeat stands still" in done.stderr) == (1, True)


def test_while_it_loads_the_probe_fails_and_says_so(bootstrap: Bootstrap) -> None:
    bootstrap.until(bootstrap.start(fault="slow"), "loading")
    done = bootstrap.probe()
    assert (done.returncode, "LOADING" in done.stderr) == (1, True)


def test_a_restart_is_visible_as_a_new_epoch(bootstrap: Bootstrap) -> None:
    epochs = []
    for _ in range(2):
        process = bootstrap.start()
        epochs.append(bootstrap.until(process, "ready")["engine_epoch"])
        process.send_signal(signal.SIGTERM)
        bootstrap.end(process)
    assert epochs[0] < epochs[1]


def test_what_a_killed_run_left_is_replaced(bootstrap: Bootstrap) -> None:
    killed = bootstrap.start()
    bootstrap.until(killed, "ready")
    killed.kill()
    bootstrap.end(killed)
    assert bootstrap.left_behind() == [bootstrap.ring, bootstrap.socket, bootstrap.status]
    process = bootstrap.start()
    bootstrap.until(process, "ready")
    bootstrap.attach()
    process.send_signal(signal.SIGTERM)
    assert bootstrap.end(process)[0] == 0
    assert bootstrap.left_behind() == []


def test_a_second_run_of_the_same_name_is_refused_and_harms_nothing(bootstrap: Bootstrap) -> None:
    first = bootstrap.start()
    bootstrap.until(first, "ready")
    code, events = bootstrap.end(bootstrap.start())
    assert code == 1
    assert f"in use by process {first.pid}" in events[-1]["error"]
    bootstrap.attach()


def test_a_socket_in_use_is_refused(bootstrap: Bootstrap) -> None:
    bootstrap.until(bootstrap.start(), "ready")
    other = Bootstrap(bootstrap.directory, bootstrap.model)
    process = other.start(f"--listen=unix:{bootstrap.socket}")
    code, events = other.end(process)
    assert code == 1
    assert "another bootstrap serves there" in events[-1]["error"]
    assert other.left_behind() == []
    bootstrap.attach()


@pytest.mark.parametrize(
    ("flags", "fault", "words"),
    [
        (["--model=/nowhere.gguf"], "", "'/nowhere.gguf': No such file"),
        (["--engine=cuda"], "", "engine is 'cuda', but"),
        (["--max-context-tokens=257"], "", "max_context_tokens is 257, the model's limit is 256"),
        ([], "load", "the weights are broken"),
        ([], "loop", "the loop is broken"),
    ],
)
def test_a_failure_is_one_clear_line_and_leaves_nothing(
    bootstrap: Bootstrap, flags: list[str], fault: str, words: str
) -> None:
    code, events = bootstrap.end(bootstrap.start(*flags, fault=fault))
    assert code == 1
    assert events[-1]["event"] == "failed"
    assert words in events[-1]["error"]
    assert bootstrap.left_behind() == []


def test_it_can_be_stopped_while_it_loads(bootstrap: Bootstrap) -> None:
    process = bootstrap.start(fault="slow")
    bootstrap.until(process, "loading")
    with pytest.raises(grpc.RpcError, match="the engine is loading"):
        bootstrap.attach()
    process.send_signal(signal.SIGTERM)
    assert bootstrap.end(process)[0] == 0
    assert bootstrap.left_behind() == []
