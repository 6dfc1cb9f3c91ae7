"""What a stranger may say of its queue pair."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from blink.v1 import bootstrap_pb2

from services.ring.verbs.grant import LaneGrant, QueuePairAddress, RemoteRegion

ADDRESS = QueuePairAddress(number=17, lid=3, gid="::ffff:10.0.0.1", first_packet=1 << 23, mtu=4096)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"number": 1 << 24}, "number is 16777216, must be 0 to 16777215"),
        ({"lid": 1 << 16}, "lid is 65536, must be 0 to 65535"),
        ({"first_packet": -1}, "first_packet is -1"),
        ({"gid": "10.0.0.1"}, "gid is '10.0.0.1', must be an IPv6 address"),
        ({"mtu": 1500}, "mtu is 1500, must be one of 256, 512, 1024, 2048, 4096"),
    ],
)
def test_an_address_that_can_not_be_is_refused_by_field_value_and_limit(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(ADDRESS, **change)


def test_the_handshakes_messages_carry_all_of_a_grant() -> None:
    regions = [RemoteRegion(offset, 4096, 1 << 40 | offset, 0xFFFF_FFF0 + offset, offset == 1) for offset in range(3)]
    grant = LaneGrant(3, 1 << 40, ADDRESS, *regions)
    assert LaneGrant.of(bootstrap_pb2.LaneGrant(**asdict(grant))) == grant
