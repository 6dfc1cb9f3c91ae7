"""The handshake over mutual TLS, and what decides whose a lane is."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from blink.v1 import bootstrap_pb2, bootstrap_pb2_grpc

from services.bootstrap.handshake import Handshake, Offer
from services.bootstrap.identity import peer_name
from services.bootstrap.lanes import LaneTable
from services.bootstrap.server import HandshakeServer
from services.common.tls import TlsError, TlsFiles
from services.ring.schema import ABI_VERSION, LAYOUT_HASH, LanePhase
from tests.support.certificates import Authority

LIMIT = 20


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server(authority: Authority, tmp_path: Path) -> Iterator[HandshakeServer]:
    handshake = Handshake()
    phases = [int(LanePhase.FREE)] * 3
    card = bootstrap_pb2.ModelCard(name="m")
    handshake.publish(Offer(77, tmp_path / "ring", card, 3000, LaneTable(3, 10, per_certificate=2), lambda: phases))
    server = HandshakeServer("localhost:0", handshake, authority.issue("localhost"))
    server.start()
    yield server
    server.stop()


def attach(server: HandshakeServer, files: TlsFiles, gateway_id: str = "0") -> bootstrap_pb2.AttachResponse:
    material = files.read()
    credentials = grpc.ssl_channel_credentials(material.authority, material.key, material.certificate)
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(server.address, credentials, options=options) as channel:
        request = bootstrap_pb2.AttachRequest(gateway_id=gateway_id, abi_version=ABI_VERSION, layout_hash=LAYOUT_HASH)
        return bootstrap_pb2_grpc.BootstrapStub(channel).Attach(request, timeout=LIMIT)


def test_a_gateway_gets_its_own_lane_again_and_no_other_gets_it_whatever_id_it_claims(
    server: HandshakeServer, authority: Authority
) -> None:
    first, second = authority.issue("dpu-a"), authority.issue("dpu-b")
    lane = attach(server, first).lane
    assert attach(server, first).lane == lane
    assert attach(server, second).lane != lane
    assert attach(server, authority.issue("dpu-c")).lane != lane
    with pytest.raises(grpc.RpcError, match="all 3 lanes are leased"):
        attach(server, authority.issue("dpu-d"))
    assert attach(server, first).lane == lane


def test_one_certificate_does_not_get_every_lane_by_claiming_many_ids(
    server: HandshakeServer, authority: Authority
) -> None:
    greedy = authority.issue("dpu-a")
    lanes = {attach(server, greedy, str(number)).lane for number in range(2)}
    for number in range(2, 5):
        with pytest.raises(grpc.RpcError, match="certificate 'dpu-a' holds 2 lanes") as caught:
            attach(server, greedy, str(number))
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert attach(server, authority.issue("dpu-b")).lane not in lanes


@pytest.mark.parametrize("whose", ["gateway", "bootstrap"])
def test_an_expired_certificate_gets_nowhere_on_either_side(
    server: HandshakeServer, authority: Authority, whose: str
) -> None:
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    gateway = authority.issue("dpu-a", until=long_ago if whose == "gateway" else None)
    if whose == "bootstrap":
        authority.issue("localhost", until=long_ago)  # takes the place of the server's files
    with pytest.raises(grpc.RpcError) as caught:
        attach(server, gateway)
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    if whose == "bootstrap":
        authority.issue("localhost")
    attach(server, authority.issue("dpu-a"))


def test_only_certificates_of_the_authority_get_in_on_both_sides(
    server: HandshakeServer, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path)
    with pytest.raises(grpc.RpcError) as caught:
        attach(server, stranger.issue("dpu-a", trusts=authority))
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.RpcError, match=r"(?i)certificate"):  # a gateway that trusts another authority
        attach(server, authority.issue("dpu-a", trusts=stranger))
    with (
        grpc.insecure_channel(server.address) as channel,
        pytest.raises(grpc.RpcError),
    ):
        bootstrap_pb2_grpc.BootstrapStub(channel).Attach(bootstrap_pb2.AttachRequest(gateway_id="0"), timeout=LIMIT)


def test_renewed_certificates_are_taken_up_without_a_restart(server: HandshakeServer, authority: Authority) -> None:
    """The server's own files are replaced by ones of another name: only clients that expect that one get in."""
    gateway = authority.issue("dpu-a")
    attach(server, gateway)
    mine = authority.issue("localhost")  # the files that the server reads
    other = authority.issue("elsewhere")
    mine.key.write_bytes(other.key.read_bytes())
    mine.certificate.write_bytes(other.certificate.read_bytes())
    with pytest.raises(grpc.RpcError):
        attach(server, gateway)
    renewed = authority.issue("localhost")
    assert renewed.key == mine.key
    attach(server, gateway)


def test_files_that_are_missing_or_no_pem_are_named(server: HandshakeServer, authority: Authority) -> None:
    files = authority.issue("dpu-a")
    with pytest.raises(TlsError, match=r"can't read .*nowhere.pem: No such file"):
        replace(files, key=files.key.with_name("nowhere.pem")).read()
    files.authority.write_bytes(b"\x30\x82")
    with pytest.raises(TlsError, match="is not a PEM file"):
        files.read()
    with pytest.raises(TlsError, match="is not a PEM file"):
        HandshakeServer("localhost:0", Handshake(), files).start()


@pytest.mark.parametrize(
    ("context", "name"),
    [
        ({}, ""),
        ({"x509_common_name": [b"dpu-a"]}, "dpu-a"),
        ({"x509_common_name": [b"dpu-a"], "x509_subject_alternative_name": [b"dpu-a.example", b"x"]}, "dpu-a.example"),
        ({"x509_subject_alternative_name": [b"spiffe://example/\xff"]}, "spiffe://example/\ufffd"),
    ],
)
def test_the_first_alternative_name_is_a_peers_name(context: dict[str, list[bytes]], name: str) -> None:
    assert peer_name(context) == name
