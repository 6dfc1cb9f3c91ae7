"""The core publishes into memory of its own for the outbound areas, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from services.gpu_engine.core._core import Scheduler
from services.ring.schema import FinishReason
from tests.gpu_engine.core.machine import Machine, expected_tokens, record


@pytest.mark.parametrize("threads", [1, 4])
def test_tokens_come_through_the_outbound_memory_alone(threads: int) -> None:
    machine = Machine(lanes=2, split=True, threads=threads)
    start = machine.geometry.outbound_offset
    gateways = [machine.attach(lane) for lane in range(2)]
    positions = [
        gateway.submit(record([5, 6, lane], max_tokens=20, seed=lane), 0) for lane, gateway in enumerate(gateways)
    ]
    for _ in range(60):
        machine.step()
        for gateway in gateways:
            gateway.read()
    for lane, (gateway, position) in enumerate(zip(gateways, positions, strict=True)):
        stream = gateway.stream(position)
        assert stream.reason is not FinishReason.NONE
        assert (stream.tokens, stream.reason) == expected_tokens([5, 6, lane], max_tokens=20, seed=lane)
    assert not machine.region[start:].any()


def test_outbound_memory_that_is_too_small_is_refused() -> None:
    machine = Machine()
    size = machine.geometry.ring_bytes - machine.geometry.outbound_offset
    with pytest.raises(ValueError, match=f"outbound bytes is {size - 1}, must be {size}"):
        Scheduler(machine.region, machine.config, outbound=np.zeros(size - 1, np.uint8))
