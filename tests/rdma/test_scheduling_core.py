"""The product's scheduling core on the host, gateways on the DPU: all that they share is one-sided operations."""

from __future__ import annotations

import dataclasses
import random

import pytest

from services.ring.errors import TransportLostError
from services.ring.record import pack_record
from services.ring.schema import FinishReason
from tests.gpu_engine.core.machine import VOCABULARY, expected_tokens
from tests.rdma.lanes import CONTEXT, GEOMETRY, Connect, Looks, attach, run_requests

ENGINE = "core"
TURNS = 6


def requests(rng: random.Random) -> tuple[list[bytes], list[tuple[list[int], FinishReason]]]:
    """As many as there are slots, and what each must get."""
    records, expected = [], []
    for slot in range(GEOMETRY.slots_per_lane):
        prompt = [rng.randrange(4, VOCABULARY) for _ in range(rng.randrange(1, 60))]
        max_tokens, seed = rng.randrange(1, 40), rng.getrandbits(32)
        records.append(pack_record(prompt, slot=slot, max_tokens=max_tokens, seed=seed))
        expected.append(expected_tokens(prompt, max_tokens=max_tokens, seed=seed, max_context=CONTEXT))
    return records, expected


def test_batches_of_requests_get_exactly_their_tokens_at_two_writes_a_request(connect: Connect) -> None:
    """Two writes submit. One acknowledgement serves all slots before they are used again."""
    rng = random.Random(5)
    looks = Looks()
    with connect(0) as transport:
        client = attach(transport)
        before = dataclasses.replace(transport.counters)
        tokens = 0
        for _ in range(TURNS):
            records, expected = requests(rng)
            got = run_requests(client, records, looks)
            assert got == expected
            tokens += sum(len(stream) for stream, _ in got)
        writes = transport.counters.writes - before.writes
        reads = transport.counters.reads - before.reads
        submitted = TURNS * GEOMETRY.slots_per_lane
        assert 2 * submitted <= writes <= 2 * submitted + (TURNS - 1) + looks.acknowledges
        assert looks.acknowledges <= tokens // (GEOMETRY.log_entries // 16)  # an eighth of the log each
        assert reads - looks.polls <= looks.with_news + TURNS  # one bulk read a look with news, two at the log's end
        print(
            f"{submitted} requests, {tokens} tokens: {writes} writes, {looks.polls} polls, "
            f"{looks.with_news} with news, {reads - looks.polls} bulk reads"
        )


def test_a_gateway_that_vanished_leaves_nothing_to_the_next_one_of_its_lane(connect: Connect) -> None:
    rng = random.Random(6)
    with connect(0) as vanished:
        client = attach(vanished)
        records, _ = requests(rng)
        for slot, record in enumerate(records):
            client.submit(record, slot * 4096)
        vanished.flush()
        with connect(0) as transport:  # the owner revokes what the one before had
            records, expected = requests(rng)
            assert run_requests(attach(transport), records) == expected
        with pytest.raises(TransportLostError):
            client.poll()
