"""One try to attach: what is refused before the ring is touched, and how long to wait until the next."""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from blink.v1 import bootstrap_pb2, bootstrap_pb2_grpc

from services.dpu_gateway.attach import AttachError, Backoff, ask_for_lane, connector_for
from services.dpu_gateway.settings import GatewaySettings
from services.ring.errors import RingError
from services.ring.schema import ABI_VERSION, LAYOUT_HASH
from tests.support.certificates import Authority


class Answering(bootstrap_pb2_grpc.BootstrapServicer):
    def __init__(self, answer: bootstrap_pb2.AttachResponse) -> None:
        self.answer = answer

    async def Attach(
        self,
        request: bootstrap_pb2.AttachRequest,
        context: grpc.aio.ServicerContext[bootstrap_pb2.AttachRequest, bootstrap_pb2.AttachResponse],
    ) -> bootstrap_pb2.AttachResponse:
        return self.answer


def answer(**fields: object) -> bootstrap_pb2.AttachResponse:
    fields = {"abi_version": ABI_VERSION, "layout_hash": LAYOUT_HASH} | fields
    return bootstrap_pb2.AttachResponse(**fields)  # type: ignore[arg-type]


@asynccontextmanager
async def bootstrap(
    directory: Path, response: bootstrap_pb2.AttachResponse, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[str]:
    server = grpc.aio.server()
    bootstrap_pb2_grpc.add_BootstrapServicer_to_server(Answering(response), server)
    if credentials is None:
        address = f"unix:{directory}/b"
        server.add_insecure_port(address)
    else:
        address = f"localhost:{server.add_secure_port('localhost:0', credentials)}"
    await server.start()
    yield address
    await server.stop(0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"abi_version": 99}, f"abi_version of the bootstrap at .* is 99, of this gateway {ABI_VERSION}"),
        ({"layout_hash": 5}, "layout_hash of the bootstrap at .* is 5"),
        (
            {"model": bootstrap_pb2.ModelCard(fingerprint="ab" * 32)},
            f"model fingerprint of the bootstrap at .* is {'ab' * 32}, of this gateway {'cd' * 32}",
        ),
    ],
)
async def test_a_grant_of_another_build_or_model_is_refused_naming_both(
    tmp_path: Path, fields: dict[str, object], words: str
) -> None:
    settings = GatewaySettings(model_fingerprint="cd" * 32)
    async with bootstrap(tmp_path, answer(**fields)) as address:
        with pytest.raises(AttachError, match=words):
            await ask_for_lane(address, settings, bootstrap_pb2.AttachRequest())


@pytest.mark.parametrize(("left", "why"), [(True, "Connection refused"), (False, "No such file or directory")])
async def test_a_bootstrap_that_is_not_there_is_said_so_in_few_words(tmp_path: Path, left: bool, why: str) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        if left:  # what a killed one leaves
            gone.bind(f"{tmp_path}/b")
    with pytest.raises(AttachError, match=f"^no bootstrap answers at unix:{tmp_path}/b: {why}$"):
        await ask_for_lane(f"unix:{tmp_path}/b", GatewaySettings(), bootstrap_pb2.AttachRequest())


async def test_over_tls_the_bootstraps_name_is_checked_and_can_be_set(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, gateway = authority.issue("host-a"), authority.issue("dpu-a")
    material = server.read()
    credentials = grpc.ssl_server_credentials(
        [(material.key, material.certificate)], material.authority, require_client_auth=True
    )
    settings = GatewaySettings(
        handshake_certificate=str(gateway.certificate),
        handshake_key=str(gateway.key),
        handshake_authority=str(gateway.authority),
        attach_timeout=20,
    )
    async with bootstrap(tmp_path, answer(lane=3), credentials) as address:
        with pytest.raises(AttachError, match="grants no lane"):
            await ask_for_lane(address, settings, bootstrap_pb2.AttachRequest())
        named = settings.model_copy(update={"bootstrap_name": "host-a"})
        assert (await ask_for_lane(address, named, bootstrap_pb2.AttachRequest())).lane == 3
        gateway.key.unlink()
        with pytest.raises(AttachError, match=r"can't read .*dpu-a.key: No such file"):
            await ask_for_lane(address, named, bootstrap_pb2.AttachRequest())


def test_another_transport_than_asked_for_is_refused() -> None:
    settings = GatewaySettings()
    connector = connector_for(settings)(settings)
    with pytest.raises(AttachError, match="offers transport verbs, this gateway is set to shm"):
        connector.connect(answer(verbs=bootstrap_pb2.LaneGrant()))


def test_verbs_without_pyverbs_is_refused_at_the_start_saying_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs.addr", None)
    monkeypatch.delitem(sys.modules, "services.ring.verbs.device", raising=False)
    with pytest.raises(RingError, match=r"transport verbs needs pyverbs .* install .* python3-pyverbs"):
        connector_for(GatewaySettings(transport="verbs"))


def test_delays_double_up_to_the_longest_and_differ_by_a_quarter() -> None:
    middle = Backoff(0.25, 2.0, rng=lambda: 0.5)
    assert [middle.next() for _ in range(6)] == [0.25, 0.5, 1, 2, 2, 2]
    middle.reset()
    assert middle.next() == 0.25
    assert Backoff(4.0, 1.0, rng=lambda: 0.0).next() == 0.75
    assert Backoff(1.0, 1.0, rng=lambda: 1.0).next() == 1.25
