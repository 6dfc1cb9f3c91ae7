"""All that a gateway writes is untrusted: bad descriptors are named, and nobody else notices them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.ring import _atomics, schema
from services.ring.schema import FinishReason, RejectCode
from tests.gpu_engine.core.machine import VOCABULARY, Gateway, Machine, expected_tokens, record

PROMPT = [4, 5, 6]


def patched(offset_of: str, value: int, size: int = 4) -> bytes:
    """A good record with one descriptor field overwritten."""
    data = bytearray(record(PROMPT))
    start = schema.DESCRIPTOR.offset_of(offset_of)
    data[start : start + size] = value.to_bytes(size, "little")
    return bytes(data)


def with_float(name: str, value: float) -> bytes:
    return patched(name, int(np.float32(value).view(np.uint32)))


REJECTED = {
    "slot beyond the lane": (patched("slot", 8), RejectCode.BAD_SLOT),
    "slot far beyond": (patched("slot", 0xFFFF_FFFF), RejectCode.BAD_SLOT),
    "no prompt": (patched("prompt_tokens", 0), RejectCode.EMPTY_PROMPT),
    "prompt fills the context": (record([1] * 64), RejectCode.PROMPT_TOO_LONG),
    "prompt count overflows": (patched("prompt_tokens", 0xFFFF_FFFF), RejectCode.PROMPT_TOO_LONG),
    "no tokens": (patched("max_tokens", 0), RejectCode.BAD_TOKEN_BUDGET),
    "min over max": (patched("min_tokens", 5), RejectCode.BAD_TOKEN_BUDGET),
    "room leaves the arena": (patched("max_tokens", 5000), RejectCode.BAD_RECORD),
    "room overflows": (patched("max_tokens", 0xFFFF_FFFF), RejectCode.BAD_RECORD),
    "token out of the vocabulary": (record([1, VOCABULARY, 2]), RejectCode.BAD_TOKEN_ID),
    "last token out of the vocabulary": (record([1, 2, 0xFFFF_FFFF]), RejectCode.BAD_TOKEN_ID),
    "temperature NaN": (with_float("temperature", math.nan), RejectCode.BAD_SAMPLING),
    "temperature negative": (with_float("temperature", -0.5), RejectCode.BAD_SAMPLING),
    "temperature infinite": (with_float("temperature", math.inf), RejectCode.BAD_SAMPLING),
    "top_p 0": (with_float("top_p", 0), RejectCode.BAD_SAMPLING),
    "top_p 2": (with_float("top_p", 2), RejectCode.BAD_SAMPLING),
    "top_p NaN": (with_float("top_p", math.nan), RejectCode.BAD_SAMPLING),
    "min_p over 1": (with_float("min_p", 1.5), RejectCode.BAD_SAMPLING),
    "repetition penalty 0": (with_float("repetition_penalty", 0), RejectCode.BAD_SAMPLING),
    "repetition penalty NaN": (with_float("repetition_penalty", math.nan), RejectCode.BAD_SAMPLING),
    "presence penalty": (with_float("presence_penalty", -2.5), RejectCode.BAD_SAMPLING),
    "frequency penalty": (with_float("frequency_penalty", math.nan), RejectCode.BAD_SAMPLING),
    "top_logprobs": (patched("top_logprobs", schema.MAX_TOP_LOGPROBS + 1), RejectCode.BAD_SAMPLING),
    "unknown flag": (patched("flags", 8), RejectCode.BAD_SAMPLING),
    "too many stop tokens": (patched("stop_token_count", 17), RejectCode.BAD_STOP_TOKENS),
    "stop token count overflows": (patched("stop_token_count", 0xFFFF_FFFF), RejectCode.BAD_STOP_TOKENS),
    "stop token out of the vocabulary": (record(PROMPT, stop_tokens=[VOCABULARY]), RejectCode.BAD_STOP_TOKENS),
    "priority too high": (patched("priority", 5), RejectCode.BAD_PRIORITY),
    "priority too low": (patched("priority", 0xFFFF_FFFB), RejectCode.BAD_PRIORITY),
}


@pytest.mark.parametrize(("data", "code"), REJECTED.values(), ids=REJECTED.keys())
def test_a_bad_descriptor_is_refused_by_name(data: bytes, code: RejectCode) -> None:
    machine = Machine()
    gateway = machine.attach()
    position = gateway.submit(data, 0)
    machine.step()
    gateway.read()
    assert gateway.stream(position).reason is FinishReason.REJECTED
    assert gateway.stream(position).code is code
    assert machine.lane_status()["rejected"] == 1
    machine.check_empty()


@pytest.mark.parametrize("line", [0xFFFF_FFFF, 1 << 8, (1 << 8) - 1, (1 << 8) - 2])
def test_a_record_at_or_past_the_arenas_end_is_refused(line: int) -> None:
    machine = Machine(arena_bytes=1 << 14)
    gateway = machine.attach()
    position = gateway.client.next_position
    _atomics.store_release(
        machine.region, machine.geometry.doorbell(0, position), schema.submission_tag(position) << 32 | line
    )
    machine.step()
    entries = read_raw(gateway)
    assert [(entry["detail"], entry["token"]) for entry in entries] == [(FinishReason.REJECTED, RejectCode.BAD_RECORD)]
    machine.check_empty()


def read_raw(gateway: Gateway) -> list[np.void]:
    gateway.client.poll()
    return list(gateway.client.read_log())


def test_a_request_that_the_page_pool_cannot_hold_alone_is_refused() -> None:
    machine = Machine(page_count=4, page_size=4)
    gateway = machine.attach()
    fits = gateway.submit(record(PROMPT, slot=0, max_tokens=13), 0)
    over = gateway.submit(record(PROMPT, slot=1, max_tokens=14), 1024)
    prompt = gateway.submit(record([1] * 16, slot=2, max_tokens=1), 2048)
    for _ in range(40):
        machine.step()
    gateway.read()
    assert gateway.stream(fits).tokens == expected_tokens(PROMPT, max_tokens=13)[0]
    assert gateway.stream(over).code is RejectCode.BAD_TOKEN_BUDGET
    assert gateway.stream(prompt).code is RejectCode.PROMPT_TOO_LONG


def test_a_busy_slot_keeps_its_status_and_its_request() -> None:
    machine = Machine()
    gateway = machine.attach()
    first = gateway.submit(record(PROMPT, slot=3, max_tokens=9), 0)
    second = gateway.submit(record(PROMPT, slot=3, max_tokens=9), 1024)
    machine.poll()
    assert int(gateway.client.slot_statuses()[3]) >> 32 == schema.submission_tag(first)
    for _ in range(20):
        machine.step()
    gateway.read()
    assert gateway.stream(second).code is RejectCode.SLOT_BUSY
    assert gateway.stream(first).tokens == expected_tokens(PROMPT, max_tokens=9)[0]


def test_a_record_that_touches_one_line_of_a_live_one_is_refused() -> None:
    machine = Machine()
    gateway = machine.attach()
    lines = schema.record_bytes(len(PROMPT), 20) // schema.LINE_BYTES
    first = gateway.submit(record(PROMPT, slot=0, max_tokens=20), 10 * 64)
    before = gateway.submit(record(PROMPT, slot=1, max_tokens=20), (10 - lines + 1) * 64)
    after = gateway.submit(record(PROMPT, slot=2, max_tokens=20), (10 + lines - 1) * 64)
    beside = gateway.submit(record(PROMPT, slot=3, max_tokens=20), (10 + lines) * 64)
    machine.poll()
    gateway.read()
    assert gateway.stream(before).code is RejectCode.RECORD_OVERLAP
    assert gateway.stream(after).code is RejectCode.RECORD_OVERLAP
    assert gateway.stream(first).reason is None
    assert gateway.stream(beside).reason is None


def test_a_record_that_changes_after_submission_changes_nothing() -> None:
    machine = Machine()
    gateway = machine.attach()
    position = gateway.submit(record(PROMPT, max_tokens=20), 0)
    machine.poll()
    start = machine.geometry.arena(0)
    machine.region[start : start + machine.geometry.arena_bytes] = 0xFF
    for _ in range(30):
        machine.step()
    gateway.read()
    assert gateway.stream(position).tokens == expected_tokens(PROMPT, max_tokens=20)[0]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1 << 32), tags=st.booleans())
def test_random_bytes_in_one_lane_harm_no_other(seed: int, tags: bool) -> None:
    scribble(1, seed, tags)


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_in_one_lane_harm_no_other_served_by_a_block_of_threads(seed: int) -> None:
    scribble(3, seed, tags=True)


def scribble(threads: int, seed: int, tags: bool) -> None:
    """A hostile gateway scribbles over all of its inbound area, while an honest one is served in full."""
    noise = np.random.default_rng(seed)
    machine = Machine(lanes=2, slots=4, threads=threads, page_count=24, log_entries=64)
    honest = machine.attach(0)
    machine.attach(1)
    geometry = machine.geometry
    inbound = machine.region[geometry.inbound(1) :][: geometry.inbound_stride]
    epoch = inbound[:8].copy()
    wanted = {}
    for turn in range(24 if threads == 1 else 6):
        inbound[8:] = noise.integers(0, 256, inbound.size - 8, np.uint8)
        if tags:
            ring_plausible_doorbells(machine, noise)
        if noise.integers(8) == 0:
            inbound[:8] = noise.integers(0, 256, 8, np.uint8)
        else:
            inbound[:8] = epoch
        if turn % 5 == 0:
            slot = turn % 4
            prompt = noise.integers(0, VOCABULARY, 6).tolist()
            position = honest.submit(record(prompt, slot=slot, max_tokens=4, seed=turn), 1024 * slot)
            wanted[position] = expected_tokens(prompt, max_tokens=4, seed=turn)
        machine.step()
        machine.check_pages()
        honest.read()
    inbound[:8] = 0
    for _ in range(12):
        machine.step()
    honest.read()
    for position, expected in wanted.items():
        assert (honest.stream(position).tokens, honest.stream(position).reason) == expected
    machine.check_empty()


def ring_plausible_doorbells(machine: Machine, noise: np.random.Generator) -> None:
    """Tags that the engine expects, over records that are good but for one random word or none."""
    geometry = machine.geometry
    outbound = machine.region[geometry.outbound(1) :][:64].view(np.uint64)
    for ahead in range(int(noise.integers(1, 4))):
        position = int(outbound[2]) + ahead
        offset = int(noise.integers(0, geometry.arena_bytes // 64)) * 64
        data = bytearray(record([1, 2, 3], slot=int(noise.integers(4)), max_tokens=int(noise.integers(1, 40))))
        if noise.integers(2):
            place = int(noise.integers(len(data) // 4)) * 4
            data[place : place + 4] = noise.bytes(4)
        start = geometry.arena(1) + offset
        room = min(len(data), geometry.arena_bytes - offset)
        machine.region[start : start + room] = np.frombuffer(bytes(data[:room]), np.uint8)
        _atomics.store_release(machine.region, geometry.doorbell(1, position), schema.doorbell_word(position, offset))


@pytest.mark.parametrize("tail", [1, 1 << 63, (1 << 64) - 1, 1000])
def test_a_tail_that_was_never_reached_gives_no_room(tail: int) -> None:
    machine = Machine(slots=2, log_entries=40)
    gateway = machine.attach()
    gateway.submit(record(PROMPT, slot=0, max_tokens=60), 0)
    offset = machine.geometry.inbound(0) + schema.LANE_INBOUND.offset_of("log_tail")
    written = 0
    for _ in range(80):
        machine.step()
        head = int(machine.lane_status()["log_backlog"])
        if tail > head:
            _atomics.store_release(machine.region, offset, tail)
        written = max(written, head)
    assert written <= 40
