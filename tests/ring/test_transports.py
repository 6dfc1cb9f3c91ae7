"""What every transport promises, and what the loopback's faults do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.ring.errors import TransportLostError
from services.ring.loopback import Faults, LoopbackTransport
from services.ring.memory import MemoryTransport, allocate_region
from services.ring.shm import ShmRing, ShmTransport
from services.ring.transport import Transport
from tests.support.rings import ring_info

OPEN_OFFSET = 8192  # inside the ring, on a page


@pytest.fixture(params=["memory", "loopback", "faulty loopback", "shm"])
def transport(request: pytest.FixtureRequest, ring_path: Path) -> Iterator[Transport]:
    if request.param == "shm":
        with ShmRing.create(ring_path, ring_info()):
            yield ShmTransport(ring_path)
        return
    region = allocate_region(1 << 14)
    makers: dict[str, Callable[[], Transport]] = {
        "memory": lambda: MemoryTransport(region),
        "loopback": lambda: LoopbackTransport(region),
        "faulty loopback": lambda: LoopbackTransport(region, Faults(reorder=True, tear=True)),
    }
    yield makers[request.param]()


def test_reads_return_what_was_written_once_flushed(transport: Transport) -> None:
    data = bytes(range(1, 256))
    transport.write(OPEN_OFFSET + 3, data)  # neither start nor end on a word
    transport.write(OPEN_OFFSET + 512, (2**64 - 2).to_bytes(8, "little"), flag=True)
    transport.flush()
    assert transport.read(OPEN_OFFSET + 2, 257) == b"\0" + data + b"\0"
    assert transport.read(OPEN_OFFSET + 512, 8) == b"\xfe" + b"\xff" * 7


def test_operations_and_bytes_are_counted(transport: Transport) -> None:
    transport.write(OPEN_OFFSET, bytes(100))
    transport.write(OPEN_OFFSET, bytes(8), flag=True)
    transport.flush()
    transport.read(OPEN_OFFSET, 64)
    counters = transport.counters
    assert (counters.writes, counters.written_bytes, counters.reads, counters.read_bytes) == (2, 108, 1, 64)


def test_publish_is_two_writes_the_flag_last(transport: Transport) -> None:
    transport.publish(OPEN_OFFSET + 64, b"payload", OPEN_OFFSET, (7).to_bytes(8, "little"))
    transport.flush()
    assert transport.read(OPEN_OFFSET, 8) == (7).to_bytes(8, "little")
    assert transport.read(OPEN_OFFSET + 64, 7) == b"payload"
    assert transport.counters.writes == 2


def test_a_read_that_was_started_is_done_once_completed(transport: Transport) -> None:
    transport.write(OPEN_OFFSET, b"12345678", flag=True)
    transport.flush()
    read = transport.start_read(OPEN_OFFSET, 8)
    transport.complete([read])
    assert (read.done, read.data) == (True, b"12345678")
    assert transport.counters.reads == 1


def test_out_of_range_is_refused(transport: Transport) -> None:
    for offset, length in ((transport.size - 7, 8), (transport.size + 1, 0)):
        with pytest.raises(IndexError):
            transport.read(offset, length)
        with pytest.raises(IndexError):
            transport.write(offset, bytes(length))


@pytest.mark.parametrize(("offset", "length"), [(4, 8), (8, 4), (8, 16)])
def test_flag_must_be_one_aligned_word(transport: Transport, offset: int, length: int) -> None:
    with pytest.raises(IndexError):
        transport.write(offset, bytes(length), flag=True)


def test_closed_transport_says_so(transport: Transport) -> None:
    transport.close()
    transport.close()
    for use in (lambda: transport.read(0, 8), lambda: transport.write(0, bytes(8)), transport.flush):
        with pytest.raises(TransportLostError):
            use()


def test_delayed_writes_are_invisible_until_delivered() -> None:
    region = allocate_region(64)
    transport = LoopbackTransport(region, Faults())
    transport.write(0, b"\1" * 16)
    assert not region.any()
    assert transport.step()
    assert region[:16].all()
    assert not transport.step()


def test_torn_payload_arrives_word_by_word() -> None:
    region = allocate_region(64)
    transport = LoopbackTransport(region, Faults(tear=True))
    transport.write(4, b"\1" * 16)
    seen = []
    while transport.step():
        seen.append(int(region.sum()))
    assert seen == [4, 12, 16]


def test_reordered_payload_keeps_the_order_of_overlapping_writes() -> None:
    outcomes = set()
    for seed in range(50):
        region = allocate_region(64)
        transport = LoopbackTransport(region, Faults(reorder=True, seed=seed))
        for value in (1, 2):
            transport.write(0, bytes([value] * 8))
        transport.write(8, b"\3" * 8)
        transport.step()
        outcomes.add((int(region[0]), int(region[8])))
        transport.flush()
        assert region[0] == 2
    assert outcomes == {(1, 0), (0, 3)}


def test_lost_peer_drops_what_is_in_flight() -> None:
    region = allocate_region(64)
    transport = LoopbackTransport(region, Faults())
    transport.write(0, b"\1" * 8)
    transport.lose_peer()
    assert not region.any()
    with pytest.raises(TransportLostError, match="peer is gone"):
        transport.step()
