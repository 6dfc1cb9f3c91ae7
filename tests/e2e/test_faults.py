"""Parts of a running product die; the rest says so, goes on and recovers."""

from __future__ import annotations

import time
from contextlib import closing

import grpc
import pytest
from blink.v1 import control_pb2

from services.common.runtime import ring_path
from services.ring.header import read_ring_info, read_status
from services.ring.schema import LanePhase
from services.ring.shm import ShmTransport
from tests.e2e.conftest import Launch
from tests.e2e.product import Product, Stream, request, until

PROMISED_SECONDS = 2.0  # from the engine's death to the status of the last stream
BUSY_MACHINE_SECONDS = 3.0  # what the test machine may add


def test_a_killed_engine_ends_streams_as_unavailable_and_comes_back(launch: Launch) -> None:
    product = launch()
    with product.channel() as channel:
        epoch = product.load().engine_epoch
        streams = [Stream(channel, request("hello", 4000)) for _ in range(3)]
        for stream in streams:
            stream.wait_for_tokens()
        killed_at = time.monotonic()
        product.bootstrap.kill()
        for stream in streams:
            stream.join()
            assert stream.code is grpc.StatusCode.UNAVAILABLE, stream.details
            assert stream.ended_at - killed_at < PROMISED_SECONDS + BUSY_MACHINE_SECONDS
        product.wait_for("bootstrap ended .killed by SIGKILL.; starting it again")
        product.wait_for("bootstrap is back")
        until(lambda: product.load().engine_epoch > epoch)
        again = Stream(channel, request("hello", 8)).join()
    assert (again.reason, len(again.ids)) == ("LENGTH", 8)
    assert product.stop() == 0
    assert product.left_behind() == []


def test_status_says_that_the_engine_is_dead_and_fails(launch: Launch) -> None:
    product = launch()
    assert product.blink("status").returncode == 0
    product.bootstrap.suspend()  # as dead as a killed one, but nobody restarts it meanwhile
    until(lambda: product.blink("status").returncode != 0)
    done = product.blink("status")
    assert done.returncode == 1
    assert "dead or unreachable" in done.stderr
    assert "UNREACHABLE" in done.stdout
    product.bootstrap.resume()
    until(lambda: product.blink("status").returncode == 0)


def worker_of(product: Product, stream: Stream) -> int:
    """The worker that serves the only open stream: the one that has its connection."""
    (local,) = [
        worker
        for worker in (0, 1)
        if any(
            connection.status == "ESTABLISHED" and connection.laddr.port == int(product.address.rpartition(":")[2])
            for connection in product.gateway(worker).net_connections("tcp")
        )
    ]
    return local


def test_a_killed_gateway_loses_its_own_streams_alone_and_comes_back(launch: Launch) -> None:
    product = launch("--workers", "2")
    start = product.load()
    with product.channel() as channel:
        victim = Stream(channel, request("hello", 4000))
        victim.wait_for_tokens()
        worker = worker_of(product, victim)
        bystander = None
        for _ in range(64):  # SO_REUSEPORT spreads connections by hash: try until one reaches the other worker
            other = grpc.insecure_channel(product.address, options=[("grpc.use_local_subchannel_pool", 1)])
            grpc.channel_ready_future(other).result(timeout=30)
            ports = {
                connection.raddr.port
                for connection in product.gateway(1 - worker).net_connections("tcp")
                if connection.status == "ESTABLISHED" and connection.raddr
            }
            if ports:
                bystander = Stream(other, request("hello", 1500))
                break
            other.close()
        assert bystander is not None
        bystander.wait_for_tokens()
        product.gateway(worker).kill()
        victim.join()
        assert victim.code is grpc.StatusCode.UNAVAILABLE
        bystander.join()
        assert (bystander.reason, len(bystander.ids)) == ("LENGTH", 1500)
        other.close()
    product.wait_for(f"gateway-{worker} is back")
    until(lambda: product.load().free_slots == start.free_slots and product.load().running_requests == 0)
    assert product.load().free_kv_pages == start.total_kv_pages
    assert [lane.attached for lane in product.load().lanes].count(True) == 2
    assert product.stop() == 0
    assert product.left_behind() == []


def test_an_engine_that_is_stopped_for_a_while_ends_streams_and_serves_again_when_it_goes_on(launch: Launch) -> None:
    product = launch()
    with product.channel() as channel:
        expected = Stream(channel, request("hello", 8)).join().ids
        streams = [Stream(channel, request("hello", 4000)) for _ in range(3)]
        for stream in streams:
            stream.wait_for_tokens()
        stopped_at = time.monotonic()
        product.bootstrap.suspend()
        for stream in streams:
            stream.join()
            assert stream.code is grpc.StatusCode.UNAVAILABLE, stream.details
            assert stream.ended_at - stopped_at < PROMISED_SECONDS + BUSY_MACHINE_SECONDS
        assert product.load().engine_state == control_pb2.ENGINE_STATE_UNREACHABLE
        product.bootstrap.resume()
        until(lambda: product.load().engine_state == control_pb2.ENGINE_STATE_READY)
        assert Stream(channel, request("hello", 8)).join().ids == expected  # and nothing of what was under way
        until(lambda: product.load().running_requests == 0)


def test_a_gateway_that_is_stopped_for_longer_than_its_lease_ends_its_streams_and_gets_its_lane_again(
    launch: Launch,
) -> None:
    product = launch("--set", "bootstrap.lanes=1")
    with product.channel() as channel:
        expected = Stream(channel, request("hello", 8)).join().ids
        stream = Stream(channel, request("hello", 4000))
        stream.wait_for_tokens()
        gateway = product.gateway(0)
        gateway.suspend()
        with closing(ShmTransport(ring_path(product.instance))) as ring:
            geometry = read_ring_info(ring).geometry
            until(lambda: read_status(ring, geometry).lanes["phase"].tolist() == [LanePhase.FREE])
            until(lambda: int(read_status(ring, geometry).counters["running"]) == 0)
        gateway.resume()
        stream.join()
        assert stream.code is grpc.StatusCode.UNAVAILABLE, stream.details
        until(lambda: product.load().engine_state == control_pb2.ENGINE_STATE_READY)
        assert Stream(channel, request("hello", 8)).join().ids == expected
    assert product.stop() == 0
    assert product.left_behind() == []


@pytest.mark.parametrize("kill", ["bootstrap", "gateway"])
def test_repeated_kills_leave_nothing_behind(launch: Launch, kill: str) -> None:
    product = launch()
    assert product.address
    for count in (1, 2):
        victim = product.bootstrap if kill == "bootstrap" else product.gateway(0)
        victim.kill()
        product.wait_for(f"{'bootstrap' if kill == 'bootstrap' else 'gateway-0'} is back", count)
    until(lambda: product.blink("generate", "hello", "--raw", "--max-tokens", "4").returncode == 0)
    assert product.stop() == 0
    assert product.left_behind() == []
