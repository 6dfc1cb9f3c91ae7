"""A ring whose outbound areas lie in other memory than the rest: gateways need not know."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from tests.rdma.lanes import Connect, attach, run_requests
from tests.rdma.test_scheduling_core import requests

if TYPE_CHECKING:
    from services.ring.verbs.device import Device

ENGINE = "split"


def test_requests_get_exactly_their_tokens_from_the_other_memory(connect: Connect) -> None:
    rng = random.Random(7)
    with connect(1) as transport:
        client = attach(transport, 1)
        grant = transport.grant
        assert grant.outbound.address - grant.header.address != grant.outbound.offset - grant.header.offset
        for _ in range(2):
            records, expected = requests(rng)
            assert run_requests(client, records) == expected


def test_memory_by_descriptor_is_refused_by_soft_roce_saying_what_it_needs(device: Device) -> None:
    from services.ring.verbs.queue_pair import REMOTE_READ, QueuePair, VerbsSetupError  # noqa: PLC0415

    queue_pair = QueuePair(device)
    descriptor = os.memfd_create("gpu")
    os.truncate(descriptor, 1 << 16)
    words = r"dma-buf\) with rxe_dpu: .*Errno: 95.*Linux 5.12 .*open kernel module.*ConnectX-5.*ring_memory = host"
    try:
        with pytest.raises(VerbsSetupError, match=words):
            queue_pair.register_dma_buf(descriptor, 0, 1 << 16, REMOTE_READ)
    finally:
        os.close(descriptor)
        queue_pair.close()
