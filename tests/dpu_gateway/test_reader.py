from __future__ import annotations

import asyncio

import numpy as np
import pytest

from services.dpu_gateway.errors import EngineRejectedError, UnavailableError
from services.dpu_gateway.reader import TokenReader
from services.dpu_gateway.streams import RequestName, Stream
from services.dpu_gateway.waiting import Waiting
from services.ring import dtypes
from services.ring.errors import CorruptLogError
from services.ring.record import pack_record
from services.ring.schema import LANE_OUTBOUND, FinishReason, LogKind, RejectCode, submission_tag
from tests.support.lanes import LanePair, lane_pair
from tests.support.rings import ring_info
from tests.support.stand_in_engine import Behaviour


class Reading:
    """A lane, its engine and a reader, stepped by hand."""

    def __init__(self, behaviour: Behaviour | None = None, max_unsent: int = 1000) -> None:
        self.pair: LanePair = lane_pair(ring_info(log_entries=256), behaviour)
        self.finished: list[Stream] = []
        self.slow: list[Stream] = []
        self.waiting = Waiting(self.pair.lane.geometry.slots_per_lane)
        self.reader = TokenReader(self.pair.lane, max_unsent, self.finished.append, self.slow.append, self.waiting)

    def submit(self, slot: int, prompt: list[int], count: int, top: int | None = None) -> Stream:
        record = pack_record(prompt, slot=slot, max_tokens=count, top_logprobs=top or 0)
        position = self.pair.lane.submit(record, slot * 4096)
        stream = Stream(
            RequestName("", f"r{slot}"),
            slot=slot,
            position=position,
            tag=submission_tag(position),
            span=slot * 4096,
            with_logprobs=top is not None,
        )
        self.reader.add(stream)
        return stream

    def round(self) -> bool:
        self.pair.engine.step()
        return self.reader.poll()


def test_each_stream_gets_its_own_tokens_in_order() -> None:
    reading = Reading(Behaviour(burst=2))
    streams = [reading.submit(slot, [slot, 100 + slot], 5) for slot in range(8)]
    got: list[list[int]] = [[] for _ in streams]
    while reading.round():
        for slot, stream in enumerate(streams):
            got[slot] += stream.take_tokens()
    assert got == [np.resize([slot, 100 + slot], 5).tolist() for slot in range(8)]
    assert sorted(stream.slot for stream in reading.finished) == list(range(8))
    assert {stream.finish for stream in streams} == {FinishReason.LENGTH}
    assert reading.reader.streams() == []


def test_a_round_with_nothing_new_reads_the_head_line_only() -> None:
    reading = Reading()
    reading.round()
    before = reading.pair.transport.counters.reads
    assert not reading.reader.poll()
    assert reading.pair.transport.counters.reads == before + 1


def test_an_admission_alone_is_no_sign_of_the_engines_beat() -> None:
    reading = Reading(Behaviour(tokens_per_second=0.001))
    stream = reading.submit(0, [1], 4)
    assert not reading.round()
    assert stream.accepted


def test_a_round_reads_the_new_part_of_the_log_at_once_whatever_the_number_of_streams() -> None:
    reading = Reading()
    for slot in range(8):
        reading.submit(slot, [1], 4)
    reading.pair.engine.step()
    before = reading.pair.transport.counters.reads
    assert reading.reader.poll()
    assert reading.pair.transport.counters.reads == before + 2


def test_logprob_entries_stay_with_their_token_also_when_a_round_ends_between_them() -> None:
    reading = Reading()
    stream = reading.submit(0, [5, 6], 2, top=3)
    reading.round()
    entries = stream.take_entries()
    assert entries["kind"].tolist() == [*[LogKind.TOP_LOGPROB] * 3, LogKind.TOKEN] * 2
    parts = entries.copy()
    stream.feed_entries(parts[:6])
    assert len(stream.take_entries()) == 4
    stream.feed_entries(parts[6:])
    assert stream.take_entries()["token"].tolist() == parts["token"][4:].tolist()
    assert stream.unsent == 0


def test_alternatives_that_come_a_round_before_their_token_are_kept_for_it() -> None:
    """As over a transport whose reads are short."""
    reading = Reading()
    stream = reading.submit(0, [5, 6], 2, top=3)
    reading.pair.engine.step()
    reading.pair.transport.largest_read = dtypes.LOG_ENTRY.itemsize
    kinds = []
    while stream.finish is FinishReason.NONE:
        reading.reader.poll()
        kinds += stream.take_entries()["kind"].tolist()
    assert kinds == [*[LogKind.TOP_LOGPROB] * 3, LogKind.TOKEN] * 2


def test_entries_of_an_earlier_submission_of_the_slot_are_dropped() -> None:
    reading = Reading()
    old = reading.submit(3, [9], 4)
    reading.pair.engine.step()  # its tokens are in the log, unread
    new = Stream(
        RequestName("", "new"), slot=3, position=old.position + 1, tag=old.tag + 1, span=0, with_logprobs=False
    )
    reading.reader.add(new)
    reading.reader.poll()
    assert new.take_tokens() == []
    assert new.finish is FinishReason.NONE


def test_a_queued_request_is_accepted_once_the_engine_took_its_doorbell() -> None:
    reading = Reading(Behaviour(tokens_per_second=0.001))
    stream = reading.submit(0, [1], 4)
    reading.reader.poll()
    assert not stream.accepted
    reading.round()
    assert stream.accepted


def test_a_doorbell_that_is_seen_taken_is_no_acceptance_before_the_log_is_read_again() -> None:
    """The engine may have taken it to refuse it, and its FINISH may come with the next round."""
    reading = Reading()
    stream = reading.submit(0, [1], 4)
    taken = reading.pair.info.geometry.outbound(0) + LANE_OUTBOUND.offset_of("next_position")
    reading.pair.transport.write(taken, (stream.position + 1).to_bytes(8, "little"), flag=True)
    reading.reader.poll()
    assert not stream.accepted
    reading.reader.poll()
    assert stream.accepted


def test_a_refused_request_is_never_accepted() -> None:
    reading = Reading(Behaviour(max_requests=0))
    stream = reading.submit(0, [1], 4)
    for _ in range(3):
        reading.round()
    assert not stream.accepted
    assert stream.finish is FinishReason.QUEUE_FULL


def test_a_stream_that_nobody_empties_is_reported_as_slow() -> None:
    reading = Reading(Behaviour(burst=4), max_unsent=10)
    stream = reading.submit(0, [1], 64)
    for _ in range(3):
        reading.round()
    assert reading.slow == [stream]
    stream.fail(UnavailableError("ended", 0))
    reading.round()
    assert stream.unsent == 0


@pytest.mark.parametrize(
    ("field", "value", "problem"), [("slot", 99, "slot 99, the lane has 8"), ("detail", 200, "unknown finish reason")]
)
def test_a_log_that_makes_no_sense_is_corrupt(field: str, value: int, problem: str) -> None:
    reading = Reading(Behaviour(max_requests=0))
    stream = reading.submit(0, [1], 4)
    reading.pair.engine.step()
    geometry = reading.pair.info.geometry
    start = geometry.log(0) + dtypes.LOG_ENTRY.itemsize * (reading.pair.lane.log_tail % geometry.log_entries)
    entry = reading.pair.region[start : start + dtypes.LOG_ENTRY.itemsize].view(dtypes.LOG_ENTRY)
    assert entry["tag"][0] == stream.tag
    entry[field] = value
    with pytest.raises(CorruptLogError, match=problem):
        reading.reader.poll()


async def test_a_waiting_coroutine_is_woken_once_for_all_that_came() -> None:
    reading = Reading(Behaviour(burst=3))
    stream = reading.submit(0, [1], 9)
    for _ in range(3):
        reading.round()
    await stream.wait()
    assert len(stream.take_tokens()) == 9


@pytest.mark.parametrize("code", [RejectCode.BAD_TOKEN_ID, 250])
def test_a_rejection_names_its_code(code: int) -> None:
    stream = Stream(RequestName("", "r"), slot=0, position=0, tag=1, span=0, with_logprobs=False)
    stream.end(FinishReason.REJECTED, code)
    with pytest.raises(EngineRejectedError, match=r"BAD_TOKEN_ID|unknown code 250"):
        stream.raise_failure(0.5)


async def test_tokens_within_the_gap_wait_for_its_end_but_first_tokens_and_the_end_do_not() -> None:
    reading = Reading(Behaviour(burst=1))
    stream = reading.submit(0, [1], 5)

    def look(now: float) -> bool:
        """A step and a look at ``now``; whether the stream was woken."""
        reading.pair.engine.step()
        reading.reader.poll(now, gap=0.04)
        woken, stream._changed = stream._changed, False
        return woken

    assert look(100.0)  # the first token
    assert not look(100.01)
    assert not look(100.02)
    assert look(100.05)
    assert len(stream.take_tokens()) == 4
    assert look(100.051)  # the last token, with the end
    assert stream.finish is FinishReason.LENGTH


async def test_a_held_stream_is_woken_when_its_gap_is_over_though_nothing_new_came() -> None:
    reading = Reading(Behaviour(burst=1))
    stream = reading.submit(0, [1], 50)
    reading.pair.engine.step()
    reading.reader.poll(100.0, gap=0.04)
    reading.pair.engine.step()
    reading.reader.poll(100.01, gap=0.04)
    await stream.wait()
    reading.reader.poll(100.041, gap=0.04)
    assert stream._changed


async def test_first_tokens_wake_their_stream_before_the_others_of_the_step_get_their_turn() -> None:
    reading = Reading(Behaviour(burst=1))
    turns: list[Stream] = []
    reading.reader._wake = turns.append
    old, new = reading.submit(0, [1], 9), reading.submit(7, [2], 9)
    old.woken_at = 1.0  # it had tokens before
    reading.pair.engine.step()
    reading.reader.poll(2.0)
    assert turns == [old]
    await asyncio.wait_for(new.wait(), 1)
    assert new.take_tokens() == [2]
