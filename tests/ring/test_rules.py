"""The ring's rules (docs/ring.md), each with the proof that its test notices a breach.

Rule 7, one layout, is test_layout.py. What rules 4 and 5 ask of the engine is tested with the scheduling core; here is
what layout, transports and lane client owe them, with the stand-in engine on the other side.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.ring import dtypes, schema
from services.ring.errors import IncompatibleRingError, LaneLostError, TransportLostError
from services.ring.header import read_ring_info, read_status
from services.ring.loopback import Faults, LoopbackTransport
from services.ring.memory import MemoryTransport, allocate_region
from services.ring.record import pack_record
from services.ring.schema import FinishReason, LogKind, RejectCode, RingGeometry, Writer
from tests.support.lanes import LEASE_TIMEOUT, LanePair, lane_pair
from tests.support.rings import private_ring, ring_info
from tests.support.stand_in_engine import FINGERPRINT, Behaviour, StandInEngine
from tests.support.stand_in_lane import StandInLane

SEEDS = range(40)
SENT = [[1000 * (request + 1) + i for i in range(40)] for request in range(3)]
HEADER_FIELDS = ["magic", "abi_version", "layout_hash", "arena_offset", "log_offset", "ring_bytes"]
NEAR_TAG_WRAP = st.integers(2**32 - 40, 2**32 + 40)
Entries = npt.NDArray[np.void]


def tokens_of(entries: Entries) -> list[int]:
    tokens: list[int] = entries["token"][entries["kind"] == LogKind.TOKEN].tolist()
    return tokens


class TestRule1Header:
    """A gateway refuses a ring whose magic, ABI, layout, sizes or model differ, saying which."""

    @pytest.mark.parametrize(
        "field", ["magic", "abi_version", "layout_hash", "arena_offset", "log_offset", "ring_bytes"]
    )
    def test_a_changed_field_is_named_with_both_values(self, field: str) -> None:
        region = private_ring(ring_info())
        header = region[: schema.RING_INFO.size].view(dtypes.RING_INFO)
        good = int(header[field][0])
        header[field] = good + 1
        with pytest.raises(IncompatibleRingError) as caught:
            read_ring_info(MemoryTransport(region))
        assert caught.value.field == field
        shown = (f"{good:#x}", f"{good + 1:#x}") if field == "magic" else (str(good), str(good + 1))
        assert all(value in str(caught.value) for value in shown)

    def test_another_model_is_refused_by_its_fingerprint(self) -> None:
        transport = MemoryTransport(private_ring(ring_info()))
        assert read_ring_info(transport, expected_fingerprint=FINGERPRINT) == ring_info()
        with pytest.raises(IncompatibleRingError, match=f"fingerprint is {FINGERPRINT.hex()}, expected {'00' * 32}"):
            read_ring_info(transport, expected_fingerprint=bytes(32))

    def test_sizes_outside_the_limits_are_refused(self) -> None:
        region = private_ring(ring_info())
        region[: schema.RING_INFO.size].view(dtypes.RING_INFO)["lanes"] = 0
        with pytest.raises(IncompatibleRingError, match="ring lanes is 0"):
            read_ring_info(MemoryTransport(region))

    @pytest.mark.parametrize("size", [64, 4096])
    def test_a_region_smaller_than_its_ring_is_refused(self, size: int) -> None:
        region = private_ring(ring_info())[:size]
        with pytest.raises(IncompatibleRingError, match="ring size is"):
            read_ring_info(MemoryTransport(region))

    def test_an_unformatted_region_is_not_a_ring(self) -> None:
        with pytest.raises(IncompatibleRingError, match="ring magic is 0x0"):
            read_ring_info(MemoryTransport(allocate_region(4096)))


def areas(geometry: RingGeometry) -> Iterator[tuple[int, int, Writer]]:
    """(start, end, writer) of all that the ring holds, in order."""
    for struct in schema.HEADER_STRUCTS:
        start = schema.header_offset(struct)
        yield start, start + struct.size, struct.writer
    start = geometry.lane_status_offset
    yield start, start + geometry.lanes * schema.LANE_STATUS.size, schema.LANE_STATUS.writer
    for lane in range(geometry.lanes):
        yield geometry.inbound(lane), geometry.arena(lane) + geometry.arena_bytes, Writer.GATEWAY
    for lane in range(geometry.lanes):
        end = geometry.log(lane) + geometry.log_entries * schema.LOG_ENTRY.size
        yield geometry.outbound(lane), end, Writer.ENGINE


class TestRule2OneWriterPerLine:
    @given(
        st.integers(1, 256), st.integers(1, 4096), st.integers(4, 10_000).map(lambda n: 64 * n), st.integers(0, 1000)
    )
    def test_no_line_has_two_writers_and_lane_areas_are_pages(
        self, lanes: int, slots: int, arena_bytes: int, extra: int
    ) -> None:
        geometry = RingGeometry(lanes, slots, arena_bytes, 4 * slots + schema.MAX_TOP_LOGPROBS + 1 + extra)
        end_line = 0
        for start, end, writer in areas(geometry):
            assert start % schema.LINE_BYTES == 0
            assert start // schema.LINE_BYTES >= end_line
            end_line = -(-end // schema.LINE_BYTES)
            if writer is Writer.GATEWAY or start >= geometry.outbound_offset:
                assert start % schema.AREA_ALIGNMENT == 0
        assert end_line * schema.LINE_BYTES <= geometry.ring_bytes

    def test_each_side_writes_only_its_own_lines(self) -> None:
        pair = lane_pair(ring_info(lanes=2))
        geometry = pair.info.geometry
        before = pair.region.copy()
        own = slice(geometry.inbound(0), geometry.inbound(0) + geometry.inbound_stride)

        def gateway_side() -> None:
            pair.lane.poll()
            pair.lane.read_log()
            pair.lane.acknowledge(now=True)
            pair.lane.cancel(0, pair.lane.submit(pack_record([1], slot=0, max_tokens=9), 0))

        def changed() -> npt.NDArray[np.intp]:
            offsets = np.flatnonzero(pair.region != before)
            before[:] = pair.region
            return offsets

        for _ in range(20):
            gateway_side()
            written = changed()
            assert written.size
            assert ((written >= own.start) & (written < own.stop)).all()
            pair.engine.step()
            written = changed()
            assert written.size
            for start, end, writer in areas(geometry):
                if writer is not Writer.ENGINE:
                    assert not ((written >= start) & (written < end)).any()


def submit_while_the_link_delivers(faults: Faults) -> list[list[int]]:
    """Three requests over the same arena bytes, the engine looking after each delivered piece; their tokens."""
    pair = lane_pair(faults=faults)
    results = []
    for request in range(3):
        pair.lane.submit(pack_record(SENT[request], slot=request, max_tokens=40), 0)
        parts = []
        while pair.transport.step():
            pair.engine.step()
        for _ in range(10):
            pair.engine.step()
            pair.lane.poll()
            parts.append(pair.lane.read_log())
        pair.lane.acknowledge(now=True)
        pair.transport.flush()
        results.append(tokens_of(np.concatenate(parts)))
    return results


def log_while_the_link_delivers(faults: Faults) -> tuple[list[int], list[int]]:
    """An engine that writes its log over a bad link; tokens written, and tokens read after each delivered piece."""
    pair = lane_pair()
    geometry = pair.info.geometry
    engine = LoopbackTransport(pair.region, faults)
    written: list[int] = []
    read: list[int] = []
    for head in range(3, 60, 3):
        batch = np.zeros(3, dtypes.LOG_ENTRY)
        batch["kind"], batch["token"] = LogKind.TOKEN, np.arange(head, head + 3)
        written += batch["token"].tolist()
        engine.write(geometry.log(0) + (head - 3) * schema.LOG_ENTRY.size, batch.tobytes())
        head_word = geometry.outbound(0) + schema.LANE_OUTBOUND.offset_of("log_head")
        engine.write(head_word, head.to_bytes(8, "little"), flag=True)
        for _ in range(2):
            engine.step()
            pair.lane.poll()
            read += pair.lane.read_log()["token"].tolist()
    while engine.step():
        pair.lane.poll()
        read += pair.lane.read_log()["token"].tolist()
    return written, read


class TestRule3PayloadFirstFlagLast:
    def test_the_engine_never_sees_a_doorbell_before_its_record(self) -> None:
        for seed in SEEDS:
            assert submit_while_the_link_delivers(Faults(reorder=True, tear=True, seed=seed)) == SENT

    def test_a_link_whose_flags_overtake_is_caught_by_the_doorbell_test(self) -> None:
        assert submit_while_the_link_delivers(Faults(tear=True, flags_overtake=True)) != SENT

    def test_the_gateway_never_sees_a_log_head_before_its_entries(self) -> None:
        for seed in SEEDS:
            written, read = log_while_the_link_delivers(Faults(reorder=True, tear=True, seed=seed))
            assert read == written

    def test_a_link_whose_flags_overtake_is_caught_by_the_log_test(self) -> None:
        written, read = log_while_the_link_delivers(Faults(tear=True, flags_overtake=True))
        assert read != written

    @settings(deadline=None, max_examples=30)
    @given(position=NEAR_TAG_WRAP, entry=st.one_of(NEAR_TAG_WRAP, st.integers(2**63, 2**63 + 200)))
    def test_submissions_go_on_over_the_wrap_of_their_tags(self, position: int, entry: int) -> None:
        pair = lane_pair(behaviour=Behaviour(first_position=position, first_log_entry=entry))
        for request in range(24):
            submitted = pair.lane.submit(pack_record([request, 7], slot=request % 8, max_tokens=3), 64 * request)
            entries = pair.run(4)
            assert tokens_of(entries) == [request, 7, request]
            assert set(entries["tag"].tolist()) == {schema.submission_tag(submitted)}

    @given(NEAR_TAG_WRAP)
    def test_an_emptied_doorbell_is_no_submission_at_any_position(self, position: int) -> None:
        assert schema.submission_tag(position) != 0

    @given(st.integers(0, 2**64 - 4097), st.integers(1, 4096))
    def test_no_two_submissions_under_way_share_a_tag(self, position: int, later: int) -> None:
        assert schema.submission_tag(position) != schema.submission_tag(position + later)

    def test_the_log_is_read_whole_from_every_offset_of_its_wrap(self) -> None:
        for first in range(61):
            pair = lane_pair(ring_info(log_entries=61), Behaviour(first_log_entry=first))
            pair.lane.submit(pack_record(range(130), slot=0, max_tokens=130), 0)
            assert tokens_of(pair.run(16)) == list(range(130))


class TestRule4InboundIsUntrusted:
    @pytest.mark.parametrize(
        ("record", "line", "code"),
        [
            (pack_record([1], slot=8, max_tokens=1), 0, RejectCode.BAD_SLOT),
            (pack_record([1], slot=1, max_tokens=1), 0, RejectCode.SLOT_BUSY),
            (pack_record([], slot=0, max_tokens=1), 0, RejectCode.EMPTY_PROMPT),
            (pack_record([1], slot=0, max_tokens=2**32 - 1), 0, RejectCode.BAD_RECORD),
            (pack_record([1], slot=0, max_tokens=1), 2**32 - 1, RejectCode.BAD_RECORD),
        ],
    )
    def test_a_bad_submission_ends_with_a_code_and_harms_no_other(
        self, record: bytes, line: int, code: RejectCode
    ) -> None:
        pair = lane_pair()
        pair.lane.submit(pack_record([5], slot=1, max_tokens=100), 1024)
        pair.engine.step()
        position = pair.lane.submit(record, 0)
        doorbell = pair.info.geometry.doorbell(0, position)
        word = schema.submission_tag(position) << 32 | line
        pair.transport.write(doorbell, word.to_bytes(8, "little"), flag=True)
        entries = pair.run()
        refused = entries[entries["tag"] == schema.submission_tag(position)]
        assert refused[["kind", "detail", "token"]].tolist() == [(LogKind.FINISH, FinishReason.REJECTED, code)]
        assert tokens_of(entries) == [5] * 100

    def test_the_tail_of_a_lying_gateway_frees_no_log(self) -> None:
        pair = lane_pair(ring_info(log_entries=64))
        pair.lane.submit(pack_record([5], slot=1, max_tokens=1000), 0)
        tail = pair.info.geometry.inbound(0) + schema.LANE_INBOUND.offset_of("log_tail")
        for lie in (2**64 - 1, 65, 1000):
            pair.transport.write(tail, lie.to_bytes(8, "little"), flag=True)
            for _ in range(20):
                pair.engine.step()
            assert pair.lane.poll().log_head <= 64


class TestRule5TheEngineNeverWaits:
    def test_a_full_log_pauses_its_lane_alone(self) -> None:
        pair = lane_pair(ring_info(lanes=2, log_entries=64))
        other = pair.rival(gateway_epoch=9, lane=1)
        other.begin_attach()
        pair.engine.step()
        assert other.attached()
        for lane in (pair.lane, other):
            lane.submit(pack_record([3], slot=0, max_tokens=500), 0)
        got: list[int] = []
        for _ in range(60):
            pair.engine.step()
            other.poll()
            got += tokens_of(other.read_log())
            other.acknowledge()
        assert got == [3] * 500
        paused_at = pair.lane.poll().log_head
        assert 0 < paused_at <= 64
        pair.engine.step()
        assert pair.lane.poll().log_head == paused_at
        assert tokens_of(pair.run(60)) == [3] * 500

    def test_a_lane_whose_lease_ran_out_is_reclaimed_and_its_epoch_not_served_again(self) -> None:
        pair = lane_pair(behaviour=Behaviour(lease_timeout=LEASE_TIMEOUT, tokens_per_second=0.001))
        pair.lane.submit(pack_record([3], slot=0, max_tokens=5), 0)
        pair.run()
        assert pair.engine.lanes[0].live.any()
        pair.clock.now += LEASE_TIMEOUT * 1.01
        for _ in range(3):
            pair.engine.step()
            assert not pair.engine.lanes[0].live.any()
            assert pair.transport.read(pair.info.geometry.outbound(0), 8) == bytes(8)

    def test_a_gateway_stops_before_the_engine_reclaims(self) -> None:
        pair = lane_pair(behaviour=Behaviour(lease_timeout=LEASE_TIMEOUT))
        pair.clock.now += LEASE_TIMEOUT
        pair.engine.step()
        assert pair.transport.read(pair.info.geometry.outbound(0), 8) != bytes(8), "the engine still serves it"
        with pytest.raises(LaneLostError, match="no lease renewal"):
            pair.lane.poll()


class _ForgetfulLane(StandInLane):
    """BROKEN on purpose: an engine whose positions start again at every attach."""

    def _serve(self, epoch: int, now: float) -> None:
        self._position = -self._geometry.slots_per_lane
        super()._serve(epoch, now)


def take_over(pair: LanePair, *, faults: Faults | None = None, late_doorbell: bool = False) -> Entries:
    """A second gateway takes a lane in mid-stream while an unseen doorbell lies there; all that it then reads."""
    pair.lane.submit(pack_record([3], slot=0, max_tokens=50), 0)
    pair.engine.step()
    position = pair.lane.submit(pack_record([666], slot=1, max_tokens=50), 1024)
    transport = LoopbackTransport(pair.region, faults)
    owner = pair.rival(gateway_epoch=8, transport=transport)
    owner.begin_attach()
    while transport.step() if faults else False:
        pair.engine.step()
    pair.engine.step()
    assert owner.attached()
    if late_doorbell:  # the old gateway's write was under way all the time
        word = schema.doorbell_word(position, 1024)
        pair.transport.write(pair.info.geometry.doorbell(0, position), word.to_bytes(8, "little"), flag=True)
    parts = []
    for _ in range(10):
        pair.engine.step()
        owner.poll()
        parts.append(owner.read_log())
    return np.concatenate(parts)


class TestRule6RestartsAreVisible:
    def test_a_new_owner_sees_nothing_of_the_old(self) -> None:
        for seed in SEEDS:
            assert take_over(lane_pair(), faults=Faults(reorder=True, tear=True, seed=seed)).size == 0

    def test_the_old_owner_learns_that_it_lost_the_lane(self) -> None:
        pair = lane_pair()
        take_over(pair)
        with pytest.raises(LaneLostError):
            pair.lane.poll()

    def test_a_doorbell_that_arrives_after_the_lane_changed_hands_is_no_submission(self) -> None:
        assert take_over(lane_pair(), late_doorbell=True).size == 0

    def test_an_engine_that_counts_from_the_start_again_is_caught(self) -> None:
        """Its new owner's first positions are those that the old owner rang."""
        pair = lane_pair(attach=False)
        pair.engine.lanes[0] = _ForgetfulLane(pair.region, pair.info.geometry, 0, pair.engine.behaviour)
        pair.attach()
        pair.lane.submit(pack_record([666], slot=1, max_tokens=50), 1024)
        owner = pair.rival(gateway_epoch=8)
        owner.begin_attach()
        pair.engine.step()
        assert owner.attached()
        word = schema.doorbell_word(0, 1024)
        pair.transport.write(pair.info.geometry.doorbell(0, 0), word.to_bytes(8, "little"), flag=True)
        pair.engine.step()
        owner.poll()
        assert 666 in tokens_of(owner.read_log())

    def test_an_engine_restart_shows_as_another_epoch_in_the_header(self) -> None:
        pair = lane_pair()
        assert read_status(pair.transport, pair.info.geometry).engine["epoch"] == pair.engine.epoch
        restarted = StandInEngine(pair.region)
        assert restarted.epoch != pair.engine.epoch
        assert read_status(pair.transport, pair.info.geometry).engine["epoch"] == restarted.epoch

    def test_a_hung_engine_shows_as_a_heartbeat_that_stands_still(self) -> None:
        pair = lane_pair()

        def heartbeat_moves() -> bool:
            before = read_status(pair.transport, pair.info.geometry).engine["heartbeat"]
            pair.engine.step()
            return bool(read_status(pair.transport, pair.info.geometry).engine["heartbeat"] != before)

        assert heartbeat_moves(), "idle, and yet alive"
        pair.engine.behaviour.heartbeat_frozen = True
        assert not heartbeat_moves()

    def test_entries_read_after_the_lease_ran_out_are_not_believed(self) -> None:
        pair = lane_pair()
        pair.lane.submit(pack_record([3], slot=0, max_tokens=5), 0)
        pair.engine.step()
        pair.lane.poll()
        transport_read = pair.transport.read

        def slow_read(offset: int, length: int) -> bytes:
            pair.clock.now += LEASE_TIMEOUT  # the process was stopped in mid-read
            return transport_read(offset, length)

        pair.transport.read = slow_read  # type: ignore[method-assign]
        with pytest.raises(LaneLostError, match="no lease renewal"):
            pair.lane.read_log()

    def test_a_lost_peer_is_an_error_not_silence(self) -> None:
        pair = lane_pair()
        pair.transport.lose_peer()
        for use in (pair.lane.poll, pair.lane.slot_statuses, lambda: pair.lane.acknowledge(now=True)):
            with pytest.raises(TransportLostError):
                use()
