from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from blink.v1 import bootstrap_pb2, bootstrap_pb2_grpc

from services.bootstrap.errors import BootstrapError
from services.bootstrap.handshake import Handshake, Offer
from services.bootstrap.lanes import LaneTable
from services.bootstrap.server import HandshakeServer
from services.ring.schema import ABI_VERSION, LAYOUT_HASH, LanePhase

CARD = bootstrap_pb2.ModelCard(name="m", tokenizer_json=b"x" * 6_000_000, eos_token_ids=[2])


@pytest.fixture
def handshake() -> Handshake:
    return Handshake()


@pytest.fixture
def server(handshake: Handshake, tmp_path: Path) -> Iterator[HandshakeServer]:
    server = HandshakeServer(f"unix:{tmp_path / 'b.sock'}", handshake)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def offer(tmp_path: Path) -> Offer:
    phases = [int(LanePhase.FREE)] * 2
    return Offer(77, tmp_path / "ring", CARD, 3000, LaneTable(2, 10), lambda: phases)


def attach(
    server: HandshakeServer, gateway_id: str = "host/0", abi: int = ABI_VERSION, layout: int = LAYOUT_HASH
) -> bootstrap_pb2.AttachResponse:
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.address, options=options) as channel:
        request = bootstrap_pb2.AttachRequest(gateway_id=gateway_id, abi_version=abi, layout_hash=layout)
        return bootstrap_pb2_grpc.BootstrapStub(channel).Attach(request, timeout=10)


def refused(server: HandshakeServer, gateway_id: str = "host/0", **fields: int) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        attach(server, gateway_id, **fields)
    assert isinstance(caught.value, grpc.Call)
    return caught.value.code(), caught.value.details()


def test_attach_grants_a_lane_and_the_model_card(server: HandshakeServer, handshake: Handshake, offer: Offer) -> None:
    handshake.publish(offer)
    answer = attach(server)
    assert (answer.engine_epoch, answer.shm.path, answer.lease_timeout_ms) == (77, str(offer.ring_path), 3000)
    assert answer.model == CARD
    again = attach(server)
    assert again.lane == answer.lane
    assert again.gateway_epoch > answer.gateway_epoch
    assert attach(server, "host/1").lane != answer.lane
    assert refused(server, "host/2")[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_attach_is_unavailable_until_the_engine_is_ready_and_once_it_drains(
    server: HandshakeServer, handshake: Handshake, offer: Offer
) -> None:
    assert refused(server) == (grpc.StatusCode.UNAVAILABLE, "the engine is loading")
    handshake.publish(offer)
    attach(server)
    handshake.withdraw("the engine is draining")
    assert refused(server) == (grpc.StatusCode.UNAVAILABLE, "the engine is draining")


def test_another_build_is_refused_naming_what_differs(server: HandshakeServer) -> None:
    code, details = refused(server, abi=ABI_VERSION + 1)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"abi_version of the gateway is {ABI_VERSION + 1}, of this bootstrap {ABI_VERSION}" in details
    code, details = refused(server, layout=1)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "layout_hash" in details


@pytest.mark.parametrize("gateway_id", ["", "x" * 129])
def test_a_bad_gateway_id_is_refused_by_field_and_limit(server: HandshakeServer, gateway_id: str) -> None:
    code, details = refused(server, gateway_id)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == f"gateway_id has {len(gateway_id)} characters, must have 1 to 128"


def test_the_socket_is_this_users_alone_and_goes_with_the_server(handshake: Handshake, tmp_path: Path) -> None:
    path = tmp_path / "b.sock"
    server = HandshakeServer(f"unix:{path}", handshake)
    server.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.stop()
    assert not path.exists()


def test_a_socket_in_use_is_refused_and_left_to_its_owner(server: HandshakeServer) -> None:
    with pytest.raises(BootstrapError, match="another bootstrap serves there"):
        HandshakeServer(server.address, Handshake()).start()
    assert refused(server)[0] is grpc.StatusCode.UNAVAILABLE


def test_the_socket_of_a_killed_run_is_replaced(handshake: Handshake, tmp_path: Path) -> None:
    path = tmp_path / "b.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    server = HandshakeServer(f"unix:{path}", handshake)
    server.start()
    assert refused(server)[0] is grpc.StatusCode.UNAVAILABLE
    server.stop()


def test_paths_that_cannot_be_a_socket_are_refused(handshake: Handshake, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BootstrapError, match="no socket"):
        HandshakeServer(f"unix:{tmp_path}/file", handshake).start()
    with pytest.raises(BootstrapError, match="too long, at most 107 bytes"):
        HandshakeServer(f"unix:{tmp_path}/{'x' * 107}", handshake).start()


def test_a_tcp_port_works_and_a_taken_one_is_refused(handshake: Handshake) -> None:
    server = HandshakeServer("127.0.0.1:0", handshake)
    server.start()
    assert refused(server)[0] is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(BootstrapError, match=server.address):
        HandshakeServer(server.address, Handshake()).start()
    server.stop()
