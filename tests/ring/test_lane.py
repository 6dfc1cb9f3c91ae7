"""The gateway's side of a lane, against the stand-in engine stepped by hand."""

from __future__ import annotations

import numpy as np
import pytest

from services.ring import schema
from services.ring.errors import AttachTimeoutError, CorruptLogError, LaneLostError
from services.ring.loopback import LoopbackTransport
from services.ring.record import pack_record
from services.ring.schema import DescriptorFlag, FinishReason, LogKind, SlotPhase
from tests.support.lanes import LEASE_TIMEOUT, LanePair, lane_pair
from tests.support.rings import ring_info
from tests.support.stand_in_engine import Behaviour


def test_a_request_is_admitted_streamed_and_finished() -> None:
    pair = lane_pair()
    position = pair.lane.submit(pack_record([5, 6, 7], slot=3, max_tokens=5), 64)
    entries = pair.run()
    assert entries["kind"].tolist() == [LogKind.ADMITTED] + [LogKind.TOKEN] * 5 + [LogKind.FINISH]
    assert entries["token"][1:-1].tolist() == [5, 6, 7, 5, 6]
    assert entries["detail"][-1] == FinishReason.LENGTH
    assert set(entries["tag"].tolist()) == {schema.submission_tag(position)}
    assert set(entries["slot"].tolist()) == {3}
    assert pair.lane.slot_statuses()[3] == schema.slot_status_word(
        schema.submission_tag(position), SlotPhase.FREE, FinishReason.LENGTH
    )


def test_alternatives_precede_their_token() -> None:
    pair = lane_pair()
    record = pack_record([5], slot=0, max_tokens=2, flags=DescriptorFlag.LOGPROBS, top_logprobs=2)
    pair.lane.submit(record, 0)
    entries = pair.run()
    assert entries["kind"].tolist() == [1, 2, 2, 3, 2, 2, 3, 4]
    assert entries["value"][1:4].tolist() == [-0.5, -1.5, -0.5]


def test_operations_per_call() -> None:
    """One-sided operations are the price of a token over RDMA, so each call has a fixed number of them."""
    pair = lane_pair(ring_info(log_entries=64))
    counters = pair.transport.counters
    before = (counters.reads, counters.writes)

    def cost(reads: int, writes: int) -> None:
        nonlocal before
        assert (counters.reads - before[0], counters.writes - before[1]) == (reads, writes)
        before = (counters.reads, counters.writes)

    position = pair.lane.submit(pack_record(range(1000), slot=0, max_tokens=9), 0)
    cost(0, 2)
    pair.engine.step()
    pair.lane.poll()
    cost(1, 0)
    assert pair.lane.read_log().size == 11
    cost(1, 0)
    assert pair.lane.read_log().size == 0
    cost(0, 0)
    assert pair.lane.acknowledge()  # more than an eighth of this small log was read
    cost(0, 1)
    assert not pair.lane.acknowledge()
    cost(0, 0)
    pair.lane.cancel(0, position)
    cost(0, 1)
    pair.lane.slot_statuses()
    cost(1, 0)


def test_an_ended_slot_is_acknowledged_when_it_is_used_again_and_all_others_with_it() -> None:
    pair = lane_pair(ring_info(log_entries=1024))
    counters = pair.transport.counters
    for slot in range(8):
        pair.lane.submit(pack_record([1], slot=slot, max_tokens=1), 1024 * slot)
    assert len(pair.run(1)) == 3 * 8
    before = counters.writes
    for slot in range(8):
        pair.lane.submit(pack_record([1], slot=slot, max_tokens=1), 1024 * slot)
    assert counters.writes - before == 2 * 8 + 1


def test_a_slot_that_never_ended_costs_no_acknowledgement() -> None:
    pair = lane_pair(ring_info(log_entries=1024))
    pair.lane.submit(pack_record([1], slot=0, max_tokens=1), 0)
    assert pair.run(1)["kind"][-1] == LogKind.FINISH
    before = pair.transport.counters.writes
    pair.lane.submit(pack_record([1], slot=1, max_tokens=1), 1024)
    assert pair.transport.counters.writes - before == 2
    pair.lane.submit(pack_record([1], slot=0, max_tokens=1), 0)
    assert pair.transport.counters.writes - before == 2 + 3


def test_a_transport_of_short_reads_gives_the_log_in_parts() -> None:
    pair = lane_pair(ring_info(log_entries=1024), Behaviour(burst=64))
    pair.transport.largest_read = 16 * 10
    pair.lane.submit(pack_record([5, 6], slot=0, max_tokens=40), 0)
    pair.engine.step()
    pair.lane.poll()
    sizes = [pair.lane.read_log().size for _ in range(6)]
    assert sizes == [10, 10, 10, 10, 2, 0]


def test_cancel_ends_the_submission_and_no_later_one_of_the_slot() -> None:
    pair = lane_pair(behaviour=Behaviour(tokens_per_second=0.001))
    position = pair.lane.submit(pack_record([1], slot=2, max_tokens=9), 0)
    pair.lane.cancel(2, position)
    assert pair.run()["detail"][-1] == FinishReason.CANCELLED
    pair.lane.submit(pack_record([1], slot=2, max_tokens=9), 0)
    assert pair.run()["kind"].tolist() == [LogKind.ADMITTED]


def test_a_log_that_is_not_acknowledged_pauses_and_goes_on_without_loss() -> None:
    pair = lane_pair(ring_info(log_entries=64))
    pair.lane.submit(pack_record(range(100, 400), slot=0, max_tokens=300), 0)
    for _ in range(100):
        pair.engine.step()
    assert pair.lane.poll().log_head - pair.lane.log_tail <= 64
    entries = pair.run(100)
    tokens = entries["token"][entries["kind"] == LogKind.TOKEN]
    np.testing.assert_array_equal(tokens, np.arange(100, 400))


def test_lane_taken_by_another_gateway_is_noticed() -> None:
    pair = lane_pair()
    rival = pair.rival(gateway_epoch=8)
    rival.begin_attach()
    assert not rival.attached()
    pair.engine.step()
    assert rival.attached()
    with pytest.raises(LaneLostError, match="epoch 8"):
        pair.lane.poll()
    with pytest.raises(LaneLostError, match="not attached"):
        pair.lane.submit(pack_record([1], slot=0, max_tokens=1), 0)


def test_lease_that_ran_out_stops_the_gateway_by_itself() -> None:
    pair = lane_pair()
    pair.clock.now += LEASE_TIMEOUT
    with pytest.raises(LaneLostError, match="no lease renewal"):
        pair.lane.submit(pack_record([1], slot=0, max_tokens=1), 0)


def test_lease_is_renewed_after_a_quarter_of_it() -> None:
    pair = lane_pair()
    assert not pair.lane.acknowledge()
    pair.clock.now += LEASE_TIMEOUT / 4
    assert pair.lane.acknowledge()


def test_a_lease_that_is_renewed_in_time_never_runs_out() -> None:
    pair = lane_pair(behaviour=Behaviour(lease_timeout=LEASE_TIMEOUT))
    for _ in range(40):
        pair.clock.now += LEASE_TIMEOUT / 3
        pair.run(1)
    pair.lane.submit(pack_record([1], slot=0, max_tokens=1), 0)


class Stopped(LoopbackTransport):
    """Its process is stopped for ``seconds`` after one operation has begun, "read" or "write"."""

    def __init__(self, pair: LanePair, operation: str, seconds: float) -> None:
        super().__init__(pair.region)
        self._clock, self._operation, self._seconds = pair.clock, operation, seconds

    def _stop_once(self, operation: str) -> None:
        if operation == self._operation:
            self._clock.now, self._seconds = self._clock.now + self._seconds, 0.0

    def write(self, offset: int, data: bytes, *, flag: bool = False) -> None:
        self._stop_once("write")
        super().write(offset, data, flag=flag)

    def read(self, offset: int, length: int) -> bytes:
        self._stop_once("read")
        return super().read(offset, length)


def test_a_renewal_counts_from_before_its_write() -> None:
    """Else a gateway stopped between its clock and its write would take the lane for its own longer than the engine."""
    pair = lane_pair()
    rival = pair.rival(8)
    rival.begin_attach()
    pair.engine.step()
    assert rival.attached()
    rival._transport = Stopped(pair, "write", LEASE_TIMEOUT * 0.9)
    rival.acknowledge(now=True)
    pair.clock.now += LEASE_TIMEOUT * 0.2
    with pytest.raises(LaneLostError, match="no lease renewal"):
        rival.poll()


def test_an_attach_whose_answer_was_read_a_lease_ago_is_not_believed() -> None:
    pair = lane_pair()
    rival = pair.rival(8)
    rival.begin_attach()
    pair.engine.step()
    rival._transport = Stopped(pair, "read", LEASE_TIMEOUT)
    with pytest.raises(LaneLostError, match="no lease renewal"):
        rival.attached()


def test_attach_gives_up_at_its_deadline() -> None:
    pair = lane_pair(attach=False)
    with pytest.raises(AttachTimeoutError, match="lane 0"):
        pair.lane.attach(timeout=-1.0)


def test_an_epoch_attaches_once() -> None:
    pair = lane_pair()
    with pytest.raises(LaneLostError, match="already attached under epoch 7"):
        pair.rival(gateway_epoch=7).begin_attach()


def test_detach_frees_the_lane() -> None:
    pair = lane_pair()
    pair.lane.detach()
    pair.engine.step()
    assert not pair.rival(gateway_epoch=8).attached()
    assert pair.transport.read(pair.info.geometry.outbound(0), 8) == bytes(8)


@pytest.mark.parametrize(("offset", "size"), [(1, 192), (-64, 192), (1 << 16, 192), ((1 << 16) - 128, 192)])
def test_record_outside_the_arena_is_refused(offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="must start on a 64-byte line"):
        lane_pair().lane.submit(bytes(size), offset)


def test_a_head_that_overran_the_reader_is_an_error_not_a_gap() -> None:
    pair = lane_pair()
    head = pair.info.geometry.outbound(0) + schema.LANE_OUTBOUND.offset_of("log_head")
    pair.transport.write(head, (129).to_bytes(8, "little"), flag=True)
    pair.lane.poll()
    with pytest.raises(CorruptLogError, match="head is 129 with 0 read"):
        pair.lane.read_log()
