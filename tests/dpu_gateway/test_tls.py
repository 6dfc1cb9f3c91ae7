"""TLS and mutual TLS on both ports with real certificates, and what a rotation of their files does."""

from __future__ import annotations

import datetime
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx2
import pytest
import trustme
from blink.v1 import inference_pb2_grpc

from services.common.settings import SettingsError
from services.dpu_gateway.settings import GatewaySettings
from services.dpu_gateway.tls import IngressTls, TlsError
from tests.dpu_gateway.harness import LEASE_TIMEOUT_MS, collect, gateway, max_tokens, text_request
from tests.dpu_gateway.test_drain import WorkerProcess, worker_process
from tests.support.stand_in_engine import Behaviour

HOST = "127.0.0.1"


class Files:
    """The three files that a gateway is given, as an operator or cert-manager writes them."""

    def __init__(self, directory: Path) -> None:
        self.certificate, self.key, self.client_ca = (directory / name for name in ("tls.crt", "tls.key", "ca.crt"))

    def issue(self, authority: trustme.CA) -> None:
        """A new certificate in place of the one that is there."""
        issued = authority.issue_cert(HOST)
        self.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        self.key.write_bytes(issued.private_key_pem.bytes())

    @property
    def flags(self) -> list[str]:
        return [f"--tls-certificate={self.certificate}", f"--tls-key={self.key}"]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@asynccontextmanager
async def serving(*flags: str) -> AsyncIterator[WorkerProcess]:
    async with (
        gateway(Behaviour(lease_timeout=LEASE_TIMEOUT_MS / 1000), workers=0) as system,
        worker_process(system, *flags) as worker,
    ):
        yield worker


async def by_grpc(
    worker: WorkerProcess, authority: trustme.CA, client: trustme.LeafCert | None = None
) -> grpc.StatusCode:
    own = () if client is None else (client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes())
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes(), *own)
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"{HOST}:{worker.port}", credentials, options=options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return (await collect(stub.Generate(text_request(stop=max_tokens(2))))).code


async def by_http(worker: WorkerProcess, authority: trustme.CA, client: trustme.LeafCert | None = None) -> int:
    context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    if client is not None:
        client.configure_cert(context)
    async with httpx2.AsyncClient(verify=context, base_url=f"https://{HOST}:{worker.http_port}") as http:
        return (await http.get("/health")).status_code


async def test_both_ports_speak_tls_and_nothing_else(files: Files) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    files.issue(authority)
    async with serving(*files.flags) as worker:
        assert await by_grpc(worker, authority) is grpc.StatusCode.OK
        assert await by_http(worker, authority) == 200
        assert await by_grpc(worker, stranger) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(httpx2.ConnectError):
            await by_http(worker, stranger)
        async with grpc.aio.insecure_channel(f"{HOST}:{worker.port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert (await collect(stub.Generate(text_request()))).code is grpc.StatusCode.UNAVAILABLE
        async with httpx2.AsyncClient() as plain:
            with pytest.raises(httpx2.TransportError):
                await plain.get(f"http://{HOST}:{worker.http_port}/health")
        worker.process.terminate()
        assert await worker.end() == 0
        assert {event["level"] for event in worker.log} == {"info"}  # strangers at the door are no event


async def test_mutual_tls_lets_in_only_clients_of_the_authority(files: Files) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    files.issue(authority)
    files.client_ca.write_bytes(authority.cert_pem.bytes())
    friend, foe = authority.issue_cert("client.example"), stranger.issue_cert("client.example")
    expired = authority.issue_cert(
        "client.example",
        not_before=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        not_after=datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
    )
    async with serving(*files.flags, f"--tls-client-authority={files.client_ca}") as worker:
        assert await by_grpc(worker, authority, friend) is grpc.StatusCode.OK
        assert await by_http(worker, authority, friend) == 200
        for client in (None, foe, expired):
            assert await by_grpc(worker, authority, client) is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(httpx2.TransportError):
                await by_http(worker, authority, client)


async def test_a_rotation_is_taken_by_new_connections_and_open_ones_go_on(files: Files) -> None:
    old, new = trustme.CA(), trustme.CA()
    files.issue(old)
    context = ssl.create_default_context(cadata=old.cert_pem.bytes().decode())
    async with serving(*files.flags) as worker, httpx2.AsyncClient(verify=context) as open_before:
        health = f"https://{HOST}:{worker.http_port}/health"
        assert (await open_before.get(health)).status_code == 200
        files.issue(new)
        assert await by_http(worker, new) == 200
        assert await by_grpc(worker, new) is grpc.StatusCode.OK
        assert await by_grpc(worker, old) is grpc.StatusCode.UNAVAILABLE
        assert (await open_before.get(health)).status_code == 200


async def test_files_in_the_middle_of_a_rotation_leave_the_old_ones_in_force_and_are_named_once(files: Files) -> None:
    authority, new = trustme.CA(), trustme.CA()
    files.issue(authority)
    async with serving(*files.flags) as worker:
        key = files.key.read_bytes()
        files.issue(new)
        new_key = files.key.read_bytes()
        files.key.write_bytes(key)  # of another certificate
        for _ in range(3):
            assert await by_http(worker, authority) == 200
            assert await by_grpc(worker, authority) is grpc.StatusCode.OK
        files.key.write_bytes(new_key)
        assert await by_http(worker, new) == 200
        worker.process.terminate()
        assert await worker.end() == 0
        assert [event["event"] for event in worker.log].count("tls_files_refused") == 1


def test_files_that_do_not_fit_together_are_refused_at_the_start(files: Files) -> None:
    files.issue(trustme.CA())
    files.key.write_bytes(trustme.CA().issue_cert(HOST).private_key_pem.bytes())
    with pytest.raises(TlsError, match="KEY_VALUES_MISMATCH"):
        IngressTls(files.certificate, files.key, None)
    with pytest.raises(TlsError, match="No such file"):
        IngressTls(Path(tempfile.gettempdir()) / "no-such-file.crt", files.key, None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tls-key=/x"], "tls_certificate is missing"),
        (["--tls-certificate=/x"], "tls_key is missing"),
        (["--tls-client-authority=/x"], "tls_client_authority needs"),
    ],
)
def test_half_a_configuration_is_refused_by_name(flags: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        GatewaySettings.load(flags)
