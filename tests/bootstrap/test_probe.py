"""The engine's probe and bootstrap's status socket, over rings in memory: what is alive, what it says otherwise."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from services.bootstrap.errors import BootstrapError
from services.bootstrap.handshake import Handshake
from services.bootstrap.probe import require_alive
from services.bootstrap.server import HandshakeServer
from services.bootstrap.status import Progress, StatusSocket
from services.common.errors import BlinkError
from services.common.runtime import status_path
from services.ring import _atomics, schema
from services.ring.header import read_status
from services.ring.memory import MemoryTransport
from services.ring.schema import EngineState
from tests.support.rings import private_ring, ring_info

INFO = ring_info()


class Engine:
    """Writes the words of a ring's header that the probe is told of."""

    def __init__(self) -> None:
        self._region = private_ring(INFO)
        self.transport = MemoryTransport(self._region)
        self.clock = 1000.0  # of the progress alone, in seconds
        self.progress = Progress(lambda: self.clock)

    def write(self, part: schema.Struct, **words: int) -> None:
        for name, value in words.items():
            offset = schema.header_offset(part) + part.offset_of(name)
            _atomics.store_release(self._region, offset, value)

    def state(self, state: EngineState) -> None:
        self.write(schema.ENGINE_STATUS, state=state)


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BLINK_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    return f"probe-{uuid4().hex[:12]}"


@pytest.fixture
def engine(instance: str, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine()
    status = StatusSocket(
        status_path(instance), lambda: engine.progress.look(read_status(engine.transport, INFO.geometry))
    )
    server = HandshakeServer(f"unix:{tmp_path / 'b.sock'}", Handshake(), status=status)
    server.start()
    yield engine
    server.stop()
    assert not status_path(instance).exists()


@pytest.fixture
def beating(engine: Engine) -> Iterator[Engine]:
    engine.state(EngineState.READY)
    stopped = threading.Event()

    def beat() -> None:
        count = 1
        while not stopped.wait(0.01):
            engine.write(schema.ENGINE_STATUS, heartbeat=count)
            count += 1

    thread = threading.Thread(target=beat)
    thread.start()
    yield engine
    stopped.set()
    thread.join()


def test_without_a_bootstrap_the_engine_is_not_alive(instance: str) -> None:
    with pytest.raises(BlinkError, match="is the engine running"):
        require_alive(instance)


def test_a_heart_that_beats_is_alive(instance: str, beating: Engine) -> None:
    require_alive(instance)
    beating.state(EngineState.DRAINING)
    require_alive(instance)


def test_a_heart_that_stands_still_is_not(instance: str, engine: Engine) -> None:
    engine.state(EngineState.READY)
    with pytest.raises(BlinkError, match="heartbeat stands still"):
        require_alive(instance, watch=0.2)


@pytest.mark.parametrize("where", ["running", "waiting"])
def test_requests_that_make_no_steps_are_named_by_the_probe_that_finds_them_at_it_for_too_long(
    instance: str, beating: Engine, where: str
) -> None:
    beating.write(schema.ENGINE_COUNTERS, running=3 << (32 * (where == "waiting")))  # the word that both share
    require_alive(instance)  # nobody has looked before: as far as is known they have just come
    beating.clock += 119
    require_alive(instance)
    beating.clock += 1
    with pytest.raises(BlinkError, match="make no steps for 120 s"):
        require_alive(instance)
    with pytest.raises(BlinkError, match="make no steps"):
        require_alive(instance)
    require_alive(instance, stall=500)


def test_steps_that_each_take_longer_than_a_probe_are_progress(instance: str, beating: Engine) -> None:
    beating.write(schema.ENGINE_COUNTERS, running=3)
    for steps in range(10):
        beating.write(schema.ENGINE_STATUS, steps=steps)
        require_alive(instance)
        beating.clock += 90
        require_alive(instance)


def test_the_first_step_after_a_rest_has_its_time_and_rest_is_no_stall(instance: str, beating: Engine) -> None:
    for _ in range(3):
        require_alive(instance)
        beating.clock += 3600
        beating.write(schema.ENGINE_COUNTERS, running=1)
        require_alive(instance)  # the request may have come just now
        beating.clock += 60
        require_alive(instance)
        beating.write(schema.ENGINE_COUNTERS, running=0)


def test_an_engine_that_loads_is_not_alive(instance: str, engine: Engine) -> None:
    with pytest.raises(BlinkError, match="LOADING"):
        require_alive(instance)


@pytest.mark.parametrize("state", [EngineState.BOOTING, EngineState.FAILED])
def test_an_engine_that_boots_or_has_failed_is_not_alive(instance: str, beating: Engine, state: EngineState) -> None:
    beating.state(state)
    with pytest.raises(BlinkError, match=state.name):
        require_alive(instance)


def test_a_state_that_is_none_is_not_alive(instance: str, beating: Engine) -> None:
    beating.write(schema.ENGINE_STATUS, state=9)
    with pytest.raises(BlinkError, match=r"unknown \(9\)"):
        require_alive(instance)


def test_a_ring_that_cant_be_read_is_not_alive_and_says_why(instance: str, beating: Engine) -> None:
    beating.transport.close()
    with pytest.raises(BlinkError, match="can't read the ring"):
        require_alive(instance)


def test_a_bootstrap_that_stands_still_is_not_alive(instance: str) -> None:
    with socket.socket(socket.AF_UNIX) as stuck:  # takes connections, as the kernel does for a stopped process
        stuck.bind(str(status_path(instance)))
        stuck.listen()
        with pytest.raises(BlinkError, match=r"does not answer .* within 0\.2 s"):
            require_alive(instance, patience=0.2)


def test_who_asks_and_does_not_wait_for_the_answer_harms_nobody(instance: str, beating: Engine) -> None:
    for _ in range(50):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(status_path(instance)))
    require_alive(instance)


def test_the_socket_is_this_users_alone_and_one_in_use_is_left_to_its_owner(
    instance: str, beating: Engine, tmp_path: Path
) -> None:
    assert stat.S_IMODE(status_path(instance).stat().st_mode) == 0o600
    taken = StatusSocket(
        status_path(instance), lambda: beating.progress.look(read_status(beating.transport, INFO.geometry))
    )
    with pytest.raises(BootstrapError, match="another bootstrap serves there"):
        HandshakeServer(f"unix:{tmp_path / 'c.sock'}", Handshake(), status=taken).start()
    require_alive(instance)


def test_it_costs_the_host_no_more_than_it_must() -> None:
    loaded = "import sys, services.bootstrap.probe; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], stdout=subprocess.PIPE, text=True, check=True)
    assert not {"numpy", "grpc", "asyncio"} & set(done.stdout.split())
