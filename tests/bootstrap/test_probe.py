"""The engine's probe, against rings in shared memory: what it takes for alive, and what it says otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from services.bootstrap.probe import require_alive
from services.common.errors import BlinkError
from services.common.runtime import ring_path
from services.ring import _atomics, schema
from services.ring.errors import RingError
from services.ring.schema import EngineState
from services.ring.shm import ShmRing
from tests.support.rings import ring_info


class Engine:
    """Writes the words of a ring's header that the probe looks at."""

    def __init__(self, ring: ShmRing) -> None:
        self._region = ring.region

    def write(self, part: schema.Struct, **words: int) -> None:
        for name, value in words.items():
            offset = schema.header_offset(part) + part.offset_of(name)
            _atomics.store_release(self._region, offset, value)

    def state(self, state: EngineState) -> None:
        self.write(schema.ENGINE_STATUS, state=state)


@pytest.fixture
def instance() -> str:
    return f"probe-{uuid4().hex[:12]}"


@pytest.fixture
def engine(instance: str) -> Iterator[Engine]:
    path: Path = ring_path(instance)
    with ShmRing.create(path, ring_info()) as ring:
        engine = Engine(ring)
        engine.state(EngineState.READY)
        yield engine
    path.unlink(missing_ok=True)


@pytest.fixture
def beating(engine: Engine) -> Iterator[Engine]:
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


def test_without_a_ring_the_engine_is_not_alive(instance: str) -> None:
    with pytest.raises((BlinkError, RingError), match="is the engine running"):
        require_alive(instance)


def test_a_heart_that_beats_is_alive(instance: str, beating: Engine) -> None:
    require_alive(instance)
    beating.state(EngineState.DRAINING)
    require_alive(instance)


def test_a_heart_that_stands_still_is_not(instance: str, engine: Engine) -> None:
    with pytest.raises(BlinkError, match="heartbeat stands still"):
        require_alive(instance, watch=0.2)


def test_requests_that_make_no_steps_are_named(instance: str, beating: Engine) -> None:
    beating.write(schema.ENGINE_COUNTERS, running=3)
    with pytest.raises(BlinkError, match="make no steps"):
        require_alive(instance, watch=0.3)


@pytest.mark.parametrize("state", [EngineState.BOOTING, EngineState.FAILED])
def test_an_engine_that_boots_or_has_failed_is_not_alive(instance: str, beating: Engine, state: EngineState) -> None:
    beating.state(state)
    with pytest.raises(BlinkError, match=state.name):
        require_alive(instance)
