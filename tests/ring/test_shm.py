"""The shared-memory ring's file: ownership, stale files, restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from services.ring.errors import RingError, RingInUseError, TransportLostError
from services.ring.header import read_ring_info, read_status
from services.ring.lane import LaneClient
from services.ring.record import pack_record
from services.ring.schema import LogKind
from services.ring.shm import ShmRing, ShmTransport
from tests.support.rings import ring_info

ROOT = Path(__file__).parents[2]


@contextmanager
def engine_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """The stand-in engine as a process of its own, ready."""
    command = [sys.executable, "-m", "tests.support.stand_in_engine", str(path), "--slots", "8"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "READY\n"
            yield process
        finally:
            process.kill()


def test_file_is_private_complete_and_gone_after_close(ring_path: Path) -> None:
    info = ring_info()
    with ShmRing.create(ring_path, info) as ring:
        stat = ring_path.stat()
        assert stat.st_mode & 0o777 == 0o600
        assert stat.st_size == info.geometry.ring_bytes == ring.region.size
        assert read_ring_info(ShmTransport(ring_path)) == info
    assert not ring_path.exists()


def test_memory_outlives_close_for_whoever_still_holds_it(ring_path: Path) -> None:
    ring = ShmRing.create(ring_path, ring_info())
    transport = ShmTransport(ring_path)
    ring.close()
    ring.close()
    ring.region[-8:] = 1
    assert transport.read(transport.size - 8, 8) == b"\1" * 8


def test_ring_of_a_live_engine_is_refused_naming_path_and_process(ring_path: Path) -> None:
    with engine_process(ring_path) as process:
        inode = ring_path.stat().st_ino
        with pytest.raises(RingInUseError, match=str(ring_path)) as caught:
            ShmRing.create(ring_path, ring_info())
        assert caught.value.pid in (process.pid, None)
        assert ring_path.stat().st_ino == inode


def test_stale_ring_of_a_killed_engine_is_replaced_and_said(ring_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_process(ring_path) as process:
        process.kill()
        process.wait()
    old = ShmTransport(ring_path)
    stale = ring_path.stat().st_ino
    with ShmRing.create(ring_path, ring_info()) as ring:
        assert ring_path.stat().st_ino != stale
        assert f"removing stale ring {ring_path}" in caplog.text
        ring.region[-8:] = 9
        assert old.read(old.size - 8, 8) == bytes(8), "the old mapping must not see the new engine"


def test_terminated_engine_leaves_no_file(ring_path: Path) -> None:
    with engine_process(ring_path) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    assert not ring_path.exists()


def test_requests_cross_processes(ring_path: Path) -> None:
    with engine_process(ring_path):
        transport = ShmTransport(ring_path)
        geometry = read_ring_info(transport).geometry
        lane = LaneClient(transport, geometry, 1, gateway_epoch=3, lease_timeout=60)
        lane.attach(timeout=20)
        lane.submit(pack_record(range(50), slot=1, max_tokens=1000), 0)
        parts = [lane.read_log()]
        deadline = time.monotonic() + 20
        while not (parts[-1]["kind"] == LogKind.FINISH).any():
            assert time.monotonic() < deadline
            lane.poll()
            parts.append(lane.read_log())
            lane.acknowledge()
        entries = np.concatenate(parts)
        tokens = entries["token"][entries["kind"] == LogKind.TOKEN]
        np.testing.assert_array_equal(tokens, np.arange(1000) % 50)
        assert read_status(transport, geometry).counters["generated_tokens"] == 1000


def test_only_one_of_many_racing_starts_owns_the_path(ring_path: Path) -> None:
    """Over a stale file, where each start first removes what it finds."""
    ring_path.write_bytes(b"stale")
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, '.')\n"
        "from services.ring.shm import ShmRing; from tests.support.rings import ring_info\n"
        "sys.stdin.read(1)\n"
        "ring = ShmRing.create(sys.argv[1], ring_info()); print('owner', flush=True); sys.stdin.read()\n"
    )
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(ring_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(4)
    ]
    for start in starts:
        assert start.stdin is not None
        start.stdin.write("x")
        start.stdin.flush()
    # Losers exit by themselves; the owner holds the ring until its input ends.
    deadline = time.monotonic() + 30
    while sum(start.poll() is None for start in starts) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    outputs = [start.communicate()[0] for start in starts]
    assert sorted(outputs) == ["", "", "", "owner\n"]


def test_opening_what_is_not_there_says_so(ring_path: Path) -> None:
    with pytest.raises(TransportLostError, match="No such file"):
        ShmTransport(ring_path)
    ring_path.touch()
    with pytest.raises(TransportLostError, match="not formatted yet"):
        ShmTransport(ring_path)


def test_no_room_is_one_clear_error_and_leaves_nothing(ring_path: Path) -> None:
    room = os.statvfs("/dev/shm")
    too_much = room.f_blocks * room.f_frsize // 64 * 64
    info = ring_info(arena_bytes=too_much)
    with pytest.raises(RingError, match=f"can't allocate {info.geometry.ring_bytes} bytes.*No space left"):
        ShmRing.create(ring_path, info)
    assert not ring_path.exists()


def test_unwritable_place_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="can't create ring"):
        ShmRing.create(tmp_path / "missing" / "ring", ring_info())
