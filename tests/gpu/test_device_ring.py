"""A ring in GPU memory, whole or in part: the control loop serves it, the host reaches it, a NIC could."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda engine's libraries are not installed: pip install 'blink[cuda]'")

from services.gpu_engine.cuda.errors import DriverError
from services.gpu_engine.cuda.ring_memory import GpuRing, RingPlace
from services.ring.errors import TransportLostError
from services.ring.parts import DmaBufPart, HostPart
from tests.gpu.serving import finish, serving
from tests.gpu_engine.core.machine import expected_tokens, record
from tests.support.rings import private_ring, ring_info

if TYPE_CHECKING:
    from services.gpu_engine.cuda.driver import Device

PLACES: list[RingPlace] = ["host", "device", "split"]
INFO = ring_info(lanes=2, arena_bytes=1 << 18)


@pytest.mark.parametrize("place", PLACES)
def test_the_control_loop_serves_a_ring_wherever_it_lies(device: Device, place: RingPlace) -> None:
    rng = random.Random(3)
    with serving(lanes=2, ring_place=place) as engine:
        gateways = [engine.attach(lane) for lane in range(2)]
        asked = []
        for slot in range(8):
            for gateway in gateways:
                prompt = [rng.randrange(4, 200) for _ in range(rng.randrange(1, 20))]
                seed = rng.getrandbits(32)
                position = gateway.submit(record(prompt, slot=slot, max_tokens=20, seed=seed), slot * 1024)
                asked.append((gateway.stream(position), prompt, seed))
        finish(*gateways)
        for stream, prompt, seed in asked:
            assert (stream.tokens, stream.reason) == expected_tokens(prompt, max_tokens=20, seed=seed)
        assert int(engine.status().engine["steps"]) > 0
        engine.stop()
        assert engine.step.faults() == 0


@pytest.mark.parametrize("place", PLACES)
def test_the_host_reads_what_it_wrote_and_the_header_stays_as_it_was(device: Device, place: RingPlace) -> None:
    region = private_ring(INFO)
    ring = GpuRing(device, region, INFO.geometry, place)
    try:
        transport = ring.transport
        assert transport.read(0, INFO.geometry.inbound_offset) == region[: INFO.geometry.inbound_offset].tobytes()
        arena = INFO.geometry.arena(1)
        data = np.random.default_rng(1).integers(0, 256, 200_003, np.uint8).tobytes()  # several pieces of staging
        transport.write(arena, data)
        transport.write(INFO.geometry.inbound(1), (7).to_bytes(8, "little"), flag=True)
        transport.flush()
        assert transport.read(arena, len(data)) == data
        assert transport.read(INFO.geometry.inbound(1), 8) == (7).to_bytes(8, "little")
        with pytest.raises(IndexError):
            transport.read(transport.size - 7, 8)
        with pytest.raises(IndexError):
            transport.write(4, bytes(4), flag=True)
    finally:
        ring.close()
    with pytest.raises(TransportLostError):
        transport.read(0, 8)


@pytest.mark.parametrize("place", ["device", "split"])
def test_a_descriptor_of_the_memory_can_be_had_and_is_closed_with_it(device: Device, place: RingPlace) -> None:
    ring = GpuRing(device, private_ring(INFO), INFO.geometry, place)
    try:
        moved = ring.moved()
    except DriverError as error:
        ring.close()
        pytest.fail(f"this driver exports no dma-buf: {error}")
    assert moved is not None
    first, *rest = moved.parts
    assert isinstance(first, DmaBufPart)
    assert "dmabuf" in str(Path(f"/proc/self/fd/{first.fd}").readlink())
    if place == "device":
        assert (first.length, rest) == (INFO.geometry.ring_bytes, [])
    else:
        (second,) = rest
        assert isinstance(second, HostPart)
        assert first.length == second.start == INFO.geometry.outbound_offset
        assert second.start + second.length == INFO.geometry.ring_bytes
    ring.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first.fd)
