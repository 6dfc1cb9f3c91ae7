"""The verbs transport over soft-RoCE: two processes, two devices, one link."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from services.ring import schema
from services.ring.errors import TransportLostError
from services.ring.header import read_ring_info, read_status
from services.ring.lane import LaneClient
from services.ring.record import pack_record
from services.ring.schema import FinishReason
from services.ring.verbs.status import CompletionError, CompletionStatus
from tests.rdma.lanes import GEOMETRY, TIME_LIMIT, Connect, Looks, attach, run_requests

if TYPE_CHECKING:  # these need pyverbs, which only the emulated machine has
    from services.ring.verbs.device import Device
    from services.ring.verbs.grant import LaneGrant
    from services.ring.verbs.transport import VerbsTransport
    from tests.rdma.sides import HostProcess

ENGINE = "stand-in"
LINK = Path(__file__).parent / "vm/link.sh"
LOSS_LIMIT = 4.0  # seconds until a loss shows: 7 sendings of 67 ms, which the standard lets take four times that


def run_request(client: LaneClient, prompt: list[int], *, slot: int = 0, max_tokens: int = 20) -> list[int]:
    ((tokens, reason),) = run_requests(client, [pack_record(prompt, slot=slot, max_tokens=max_tokens)])
    assert reason is FinishReason.LENGTH
    return tokens


def test_reads_return_what_was_written(connect: Connect) -> None:
    arena = GEOMETRY.arena(0)
    with connect() as transport:
        data = bytes(range(1, 256))
        transport.write(arena + 3, data)  # neither start nor end on a word
        transport.write(arena + 512, (2**64 - 2).to_bytes(8, "little"), flag=True)
        transport.flush()
        assert transport.read(arena + 2, 257) == b"\0" + data + b"\0"
        assert transport.read(arena + 512, 8) == b"\xfe" + b"\xff" * 7
        assert dataclasses.astuple(transport.counters) == (2, 263, 2, 265, 5)


def test_thousands_of_writes_of_all_sizes_arrive_whole_and_in_order(connect: Connect, host: HostProcess) -> None:
    """Many times the depth of the queue and the size of staging, without a read between."""
    rng = random.Random(1)
    arena, size = GEOMETRY.arena(0), GEOMETRY.arena_bytes
    with connect(depth=128) as transport:
        for _ in range(6):  # each longer than staging, together more than the link takes before it answers
            expected = bytearray(rng.randbytes(size))
            transport.write(arena, bytes(expected))
        for _ in range(2000):
            length = rng.choice((8, 64, 65, 200, 1000, 5000, 20_000) if rng.random() < 0.1 else (8, 64, 65, 200))
            offset = rng.randrange(size - length)
            data = rng.randbytes(length)
            transport.write(arena + offset, data)
            expected[offset : offset + length] = data
        transport.flush()
        assert transport.read(arena, size) == expected


def test_an_outage_shorter_than_the_retries_loses_nothing(connect: Connect) -> None:
    """What is sent again is read from staging again, so none of it may have been overwritten by later writes."""
    data = random.Random(2).randbytes(GEOMETRY.arena_bytes)  # four times as long as staging
    with connect(ack_timeout=17) as transport:  # 7 sendings of 537 ms
        transport.flush()
        subprocess.run(["sh", LINK, "down"], check=True)
        with subprocess.Popen(["sh", LINK, "up"]) as restoring:
            transport.write(GEOMETRY.arena(0), data)
            transport.flush()
        assert restoring.returncode == 0
        assert transport.read(GEOMETRY.arena(0), len(data)) == data


def test_out_of_range_and_closed_are_refused_without_an_operation(connect: Connect) -> None:
    with connect() as transport:
        for offset, length in ((transport.size - 7, 8), (transport.size + 1, 0), (GEOMETRY.arena(1), 8)):
            with pytest.raises(IndexError):
                transport.read(offset, length)
            with pytest.raises(IndexError):
                transport.write(offset, bytes(length))
        with pytest.raises(IndexError):
            transport.write(0, bytes(8))  # the header is only read
        for offset, length in ((4, 8), (8, 4), (8, 16)):
            with pytest.raises(IndexError):
                transport.write(GEOMETRY.arena(0) + offset, bytes(length), flag=True)
        assert (transport.counters.writes, transport.counters.reads) == (0, 0)
        transport.close()
        transport.close()
        for use in (lambda: transport.read(0, 8), lambda: transport.write(0, bytes(8)), transport.flush):
            with pytest.raises(TransportLostError, match="closed"):
                use()


def test_header_and_status_are_read(connect: Connect) -> None:
    with connect() as transport:
        assert read_ring_info(transport).geometry == GEOMETRY
        first = int(read_status(transport, GEOMETRY).engine["heartbeat"])
        deadline = time.monotonic() + TIME_LIMIT
        while int(read_status(transport, GEOMETRY).engine["heartbeat"]) == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_request_costs_two_writes_sent_off_together_and_one_bulk_read_for_each_look_with_news(
    connect: Connect,
) -> None:
    with connect() as transport:
        client = attach(transport)
        before = dataclasses.replace(transport.counters)
        looks = Looks()
        prompt = list(range(100, 150))
        ((tokens, _),) = run_requests(client, [pack_record(prompt, slot=0, max_tokens=100)], looks)
        assert tokens == np.resize(prompt, 100).tolist()
        record = schema.DESCRIPTOR.size + 4 * len(prompt)
        counters = transport.counters
        assert counters.writes - before.writes == 2
        assert counters.written_bytes - before.written_bytes == record + 8
        assert counters.reads - before.reads == looks.polls + looks.with_news
        assert counters.posts - before.posts == 1 + looks.polls + looks.with_news
        print(f"polls {looks.polls}, with news {looks.with_news}, for 102 entries")


def test_published_data_is_there_before_its_flag_whatever_its_size(connect: Connect) -> None:
    """Inline, staged, and longer than one work request may be; many times what staging holds."""
    rng = random.Random(3)
    arena = GEOMETRY.arena(0)
    with connect() as transport:
        for turn in range(1, 120):
            data = rng.randbytes(rng.choice((8, 64, 72, 1000, 4096, 40_000)))
            transport.publish(arena + 64, data, arena, turn.to_bytes(8, "little"))
            if turn % 7 == 0:
                assert transport.read(arena, 8) == turn.to_bytes(8, "little")
                assert transport.read(arena + 64, len(data)) == data


def test_reads_under_way_finish_in_order_while_others_are_started(connect: Connect) -> None:
    arena = GEOMETRY.arena(0)
    data = random.Random(4).randbytes(1 << 15)
    with connect() as transport:
        transport.write(arena, data)
        spans = [(offset, 3000) for offset in range(0, 1 << 15, 3000)][:-1]  # more than there is room for at once
        reads = [transport.start_read(arena + offset, length) for offset, length in spans]
        assert [read.done for read in reads] == sorted((read.done for read in reads), reverse=True)
        transport.complete(reads)
        assert [read.data for read in reads] == [data[offset : offset + length] for offset, length in spans]
        with pytest.raises(IndexError, match="at most"):
            transport.start_read(arena, transport.largest_read + 1)


def test_two_gateways_work_at_once(connect: Connect) -> None:
    with connect(0) as first, connect(1) as second:
        clients = [attach(first, 0), attach(second, 1)]
        for turn in range(5):
            for number, client in enumerate(clients):
                prompt = [1000 * number + turn, 7]
                assert run_request(client, prompt, slot=turn) == prompt * 10


@pytest.mark.parametrize("target", ["another lane", "beyond the own lane", "the engine's lines", "the header"])
def test_writes_outside_of_the_own_lane_are_refused_by_the_owners_nic_and_harm_nobody(
    connect: Connect, host: HostProcess, target: str
) -> None:
    """The hostile gateway knows every key and address, and its own software checks nothing."""
    with connect(1) as victim:
        neighbour = attach(victim, 1)

        def forge(grant: LaneGrant) -> LaneGrant:
            longer = dataclasses.replace(grant.inbound, length=2 * grant.inbound.length)
            changes: dict[str, dict[str, Any]] = {
                "another lane": {"inbound": victim.grant.inbound},
                "beyond the own lane": {"inbound": longer},
                "the engine's lines": {"outbound": dataclasses.replace(grant.outbound, writable=True)},
                "the header": {"header": dataclasses.replace(grant.header, writable=True)},
            }
            return dataclasses.replace(grant, **changes[target])

        offset = {"the engine's lines": GEOMETRY.log(0), "the header": 0}.get(target, GEOMETRY.arena(1))
        with connect(0, forge) as hostile:
            before = host.digest(offset, 64)
            hostile.write(offset, b"\xff" * 64)
            with pytest.raises(CompletionError, match="REM_ACCESS_ERR"):
                hostile.flush()
            assert host.digest(offset, 64) == before
            with pytest.raises(CompletionError, match="REM_ACCESS_ERR"):  # it stays lost
                hostile.read(0, 8)
        assert run_request(neighbour, [5, 6]) == [5, 6] * 10


def test_another_lane_can_not_be_read_either(connect: Connect) -> None:
    with connect(1) as victim:
        stolen = victim.grant.inbound
        with (
            connect(0, lambda grant: dataclasses.replace(grant, inbound=stolen)) as hostile,
            pytest.raises(CompletionError, match="REM_ACCESS_ERR"),
        ):
            hostile.read(GEOMETRY.arena(1), 64)
        victim.flush()


def test_a_wrong_key_is_named_with_its_status(connect: Connect) -> None:
    def forge(grant: LaneGrant) -> LaneGrant:
        return dataclasses.replace(grant, header=dataclasses.replace(grant.header, rkey=grant.header.rkey ^ 0x5A00))

    with connect(0, forge) as transport:
        with pytest.raises(CompletionError, match=r"REM_ACCESS_ERR \(status 10\)") as caught:
            transport.read(0, 64)
        assert caught.value.status is CompletionStatus.REM_ACCESS_ERR


def test_keys_of_an_earlier_connection_open_nothing_on_a_later_one(connect: Connect, host: HostProcess) -> None:
    """A gateway that attaches again, and goes on with what it was granted before."""
    with connect() as first:
        first.flush()
        old = first.grant
        with connect(0, lambda grant: dataclasses.replace(grant, header=old.header, inbound=old.inbound)) as second:
            before = host.digest(GEOMETRY.arena(0), 64)
            second.write(GEOMETRY.arena(0), b"\xff" * 64)
            with pytest.raises(CompletionError, match="REM_ACCESS_ERR"):
                second.flush()
            assert host.digest(GEOMETRY.arena(0), 64) == before
        with pytest.raises(
            CompletionError, match="RETRY_EXC_ERR"
        ):  # the first connection ended with the second's grant
            first.flush()


def test_a_dead_link_is_busy_long_before_a_write_would_have_to_wait(connect: Connect) -> None:
    with connect(depth=128, ack_timeout=17) as transport:  # 7 sendings of 537 ms
        transport.flush()
        subprocess.run(["sh", LINK, "down"], check=True)
        try:
            start = time.monotonic()
            count = 0
            while not transport.busy:
                transport.write(GEOMETRY.arena(0) + 8 * count, count.to_bytes(8, "little"), flag=True)
                count += 1
            for _ in range(60):  # what requests under way may still need: one write each to cancel them
                transport.write(GEOMETRY.arena(0) + 8 * count, count.to_bytes(8, "little"), flag=True)
                count += 1
            assert time.monotonic() - start < 0.5  # less than until the first sending again
        finally:
            subprocess.run(["sh", LINK, "up"], check=True)
        transport.flush()
        assert not transport.busy
        expected = b"".join(number.to_bytes(8, "little") for number in range(count))
        assert transport.read(GEOMETRY.arena(0), len(expected)) == expected


def test_revoked_access_ends_the_transport_in_bounded_time(connect: Connect, host: HostProcess) -> None:
    with connect() as transport:
        transport.flush()
        host.ask(do="detach", lane=0)
        assert_lost(transport, {CompletionStatus.RETRY_EXC_ERR})


def test_a_cut_link_ends_the_transport_in_bounded_time_and_a_new_one_works_once_it_is_back(connect: Connect) -> None:
    with connect() as transport:
        transport.flush()
        subprocess.run(["sh", LINK, "down"], check=True)
        try:
            assert_lost(transport, {CompletionStatus.RETRY_EXC_ERR})
        finally:
            subprocess.run(["sh", LINK, "up"], check=True)
    with connect() as transport:
        assert run_request(attach(transport), [1, 2, 3]) == np.resize([1, 2, 3], 20).tolist()


def test_ends_that_disagree_on_the_size_of_packets_are_found_at_the_first_long_record(
    host: HostProcess, device: Device
) -> None:
    """The handshake gives both the smaller one; here the owner is told less than the gateway sends."""
    from services.ring.verbs.queue_pair import QueuePair  # noqa: PLC0415
    from services.ring.verbs.transport import VerbsTransport  # noqa: PLC0415

    queue_pair = QueuePair(device)
    grant = host.attach(0, dataclasses.replace(queue_pair.address, mtu=1024))
    transport = VerbsTransport(queue_pair, grant)
    try:
        transport.write(GEOMETRY.arena(0), bytes(1000))
        transport.flush()
        transport.write(GEOMETRY.arena(0), bytes(8000))
        with pytest.raises(CompletionError, match=r"REM_INV_REQ_ERR.*MTU"):
            transport.flush()
    finally:
        transport.close()


def test_a_killed_host_ends_the_transport_in_bounded_time(hosts: list[HostProcess], device: Device) -> None:
    from tests.rdma.sides import connection  # noqa: PLC0415

    doomed = hosts[1]
    doomed.ask(do="serve", engine=ENGINE)
    with connection(doomed, device, 0) as transport:
        transport.flush()
        doomed.kill()
        assert_lost(transport, {CompletionStatus.RETRY_EXC_ERR})


def assert_lost(transport: VerbsTransport, statuses: set[CompletionStatus]) -> None:
    start = time.monotonic()
    transport.write(GEOMETRY.arena(0), bytes(8), flag=True)  # posted: that it is lost shows later
    with pytest.raises(CompletionError) as caught:
        transport.flush()
    elapsed = time.monotonic() - start
    print(f"{caught.value} after {elapsed:.2f} s")
    assert caught.value.status in statuses
    assert elapsed < LOSS_LIMIT
    with pytest.raises(TransportLostError):
        transport.write(GEOMETRY.arena(0), bytes(8), flag=True)
