"""A real control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, each a process here."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import requests
import trustme
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.cluster.binaries import debian, kubernetes
from tests.cluster.processes import Processes

START_SECONDS = 90.0
ADMIN = "admin"
LOOPBACK = "127.0.0.1"
API_SERVICE = "10.0.0.1"  # the first address of --service-cluster-ip-range: kubernetes.default.svc
FIRST_ACCOUNT = "/api/v1/namespaces/default/serviceaccounts/default"
Json = dict[str, Any]


class ControlPlane:
    """Start it as a context. ``users`` are people with a token: name -> groups.

    On another ``address`` than loopback real kubelets and pods reach it; on loopback nodes are objects alone.
    """

    def __init__(self, directory: Path, users: dict[str, list[str]], address: str = LOOPBACK) -> None:
        self.directory = directory
        self.address = address
        self.port, self._etcd_port, self._peer_port, self._manager_port, self._scheduler_port = free_ports(5)
        self.server = f"https://{address}:{self.port}"
        self._tokens = {name: secrets.token_hex(16) for name in (ADMIN, *users)}
        self._users = {ADMIN: ["system:masters"], **users}
        self._processes = Processes(directory)
        self._authority = trustme.CA()
        self._write_files()

    def __enter__(self) -> ControlPlane:
        try:
            self._start_etcd()
            self.start_api_server()
            self._start_managers()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def client(self, user: str = ADMIN) -> Client:
        """The API as this user."""
        return Client(self.server, self._tokens[user], str(self.directory / "ca.pem"))

    def kubeconfig(self, user: str = ADMIN) -> Path:
        """A file for kubectl, helm and the operator."""
        return self._kubeconfig(user, self._tokens[user])

    def kubeconfig_of(self, namespace: str, account: str) -> Path:
        """The same for a service account, with a token of its own."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        made = self.client().create(path, {"spec": {"expirationSeconds": 7200}})
        return self._kubeconfig(f"{namespace}-{account}", made["status"]["token"])

    def start_api_server(self) -> None:
        """Also after it was stopped."""
        at = self.directory
        self._run(
            "kube-apiserver",
            [
                f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
                f"--bind-address={self.address}",
                f"--advertise-address={self.address}",
                f"--secure-port={self.port}",
                f"--tls-cert-file={at}/server.pem",
                f"--tls-private-key-file={at}/server.key",
                f"--token-auth-file={at}/tokens.csv",
                "--authorization-mode=RBAC",
                "--service-cluster-ip-range=10.0.0.0/24",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={at}/accounts.pub",
                f"--service-account-signing-key-file={at}/accounts.key",
                "--kubelet-preferred-address-types=InternalIP",
                # A Service may not have an endpoint on loopback.
                *(["--endpoint-reconciler-type=none"] if self.address == LOOPBACK else []),
            ],
        )
        self._until("the API server is ready", lambda: self.client().call("GET", "/readyz").status_code == 200)

    def stop_api_server(self) -> None:
        self._processes.end("kube-apiserver")

    def stop(self) -> None:
        self._processes.end_all()

    def _start_etcd(self) -> None:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        arguments = [
            f"--data-dir={self.directory}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        ]
        self._processes.start("etcd", [debian("etcd", "etcd-server"), *arguments])

    def _start_managers(self) -> None:
        config = self.kubeconfig()
        self._run(
            "kube-controller-manager",
            [
                f"--kubeconfig={config}",
                f"--service-account-private-key-file={self.directory}/accounts.key",
                f"--root-ca-file={self.directory}/ca.pem",
                "--use-service-account-credentials=false",
                "--leader-elect=false",
                f"--secure-port={self._manager_port}",
                "--bind-address=127.0.0.1",
                # Five minutes otherwise, in which a quota does not know yet how many there are of a new kind.
                "--resource-quota-sync-period=3s",
                # Nodes that are objects alone report nothing, and none is to be called dead for it.
                *(["--controllers=*,-node-lifecycle-controller"] if self.address == LOOPBACK else []),
            ],
        )
        self._run(
            "kube-scheduler",
            [
                f"--kubeconfig={config}",
                f"--authentication-kubeconfig={config}",
                f"--authorization-kubeconfig={config}",
                "--leader-elect=false",
                f"--secure-port={self._scheduler_port}",
                "--bind-address=127.0.0.1",
            ],
        )
        # The first sign of work: it makes each namespace its account.
        self._until("controllers work", lambda: bool(self.client().find(FIRST_ACCOUNT)))

    def _run(self, program: str, arguments: list[str]) -> None:
        self._processes.start(program, [kubernetes() / program, *arguments])

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        def look() -> bool:
            with contextlib.suppress(requests.ConnectionError):
                return holds()
            return False

        self._processes.until(what, look, START_SECONDS)

    def _kubeconfig(self, name: str, token: str) -> Path:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": self.server, "certificate-authority": str(self.directory / "ca.pem")},
                }
            ],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        path = self.directory / f"{name}.kubeconfig"
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def _write_files(self) -> None:
        at = self.directory
        self._authority.cert_pem.write_to_path(at / "ca.pem")
        server = self._authority.issue_cert(self.address, API_SERVICE, "kubernetes.default.svc")
        server.private_key_pem.write_to_path(at / "server.key")
        for blob in server.cert_chain_pems:
            blob.write_to_path(at / "server.pem", append=True)
        key = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (at / "accounts.key").write_bytes(private)
        (at / "accounts.pub").write_bytes(public)
        lines = [f'{self._tokens[name]},{name},{name},"{",".join(groups)}"' for name, groups in self._users.items()]
        (at / "tokens.csv").write_text("\n".join(lines) + "\n")


class Client:
    """The API server's own paths and JSON; what is refused fails, but for ``call``."""

    def __init__(self, server: str, token: str, authority: str) -> None:
        self._server = server
        self._token = token
        self._authority = authority

    def call(self, verb: str, path: str, body: Json | None = None) -> requests.Response:
        # A session would outlive a restart of the server, and its authority is overridden by the environment.
        kind = "application/merge-patch+json" if verb == "PATCH" else "application/json"
        return requests.request(
            verb,
            self._server + path,
            data=None if body is None else json.dumps(body),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": kind},
            verify=self._authority,
            timeout=30,
        )

    def find(self, path: str) -> Json | None:
        answer = self.call("GET", path)
        return None if answer.status_code == HTTPStatus.NOT_FOUND else _json(answer)

    def get(self, path: str) -> Json:
        return _json(self.call("GET", path))

    def items(self, path: str) -> list[Json]:
        found: list[Json] = self.get(path)["items"]
        return found

    def create(self, path: str, thing: Json) -> Json:
        return _json(self.call("POST", path, thing))

    def patch(self, path: str, change: Json) -> Json:
        return _json(self.call("PATCH", path, change))

    def delete(self, path: str, options: Json | None = None) -> None:
        answer = self.call("DELETE", path, options)
        assert answer.ok or answer.status_code == HTTPStatus.NOT_FOUND, answer.text


def _json(answer: requests.Response) -> Json:
    assert answer.ok, f"{answer.request.method} {answer.url}: {answer.text}"
    found: Json = answer.json()
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
