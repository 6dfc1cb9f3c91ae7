"""Kueue itself, a process beside the control plane; without its webhooks, which check what people write.

``python -m tests.cluster.kueue`` builds it.
"""

from __future__ import annotations

import json
from pathlib import Path

import requests
import trustme
import yaml

from tests.cluster.binaries import go, go_build
from tests.cluster.control_plane import Client, ControlPlane, Json, free_ports
from tests.cluster.fetch_helm import CACHE
from tests.cluster.processes import Processes, end_by_sigterm
from tests.cluster.scene import eventually

MODULE = Path(__file__).parent / "kueue_module"
PACKAGE = "sigs.k8s.io/kueue/cmd/kueue"
API = "/apis/kueue.x-k8s.io/v1beta2"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
START_SECONDS = 90.0
# Kueue looks for the certificate of its metrics in a fixed place below /etc: it gets an /etc of its own.
OWN_ETC = (
    'mkdir -p etc/kueue/metrics/certs && cp tls.* etc/kueue/metrics/certs && mount --bind etc /etc && exec "$0" "$@"'
)


class Kueue:
    """Start it as a context: installs its kinds, and takes them away again."""

    def __init__(self, plane: ControlPlane, directory: Path) -> None:
        self._plane = plane
        self._client: Client = plane.client()
        self._directory = directory / "kueue"
        self._directory.mkdir()
        self._processes = Processes(self._directory)
        self._kinds: list[str] = []

    def __enter__(self) -> Kueue:
        try:
            program, kinds = _built()
            for path in sorted(kinds.glob("*.yaml")):
                made = self._client.create(CRDS, yaml.safe_load(path.read_text()))
                self._kinds.append(made["metadata"]["name"])
            wanted = {name.partition(".")[0] for name in self._kinds}
            eventually(lambda: wanted <= self._served())
            self._start(program)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for plural in ("workloads", "localqueues", "clusterqueues", "resourceflavors"):
            if self._client.call("GET", f"{API}/{plural}").ok:
                for thing in self._client.items(f"{API}/{plural}"):
                    self._release(plural, thing)
        self._processes.end_all()
        for name in self._kinds:
            self._client.delete(f"{CRDS}/{name}")
        for name in self._kinds:
            eventually(lambda name=name: self._client.find(f"{CRDS}/{name}") is None)  # type: ignore[misc]

    def queue(self, name: str, namespace: str, cores: int) -> None:
        """A LocalQueue of this namespace, with a quota of cores of its own."""
        self._client.create(f"{API}/resourceflavors", {**_kind("ResourceFlavor"), "metadata": {"name": name}})
        quota = [{"name": "cpu", "nominalQuota": cores}, {"name": "memory", "nominalQuota": "64Gi"}]
        group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": name, "resources": quota}]}
        spec = {"namespaceSelector": {}, "resourceGroups": [group]}
        self._client.create(f"{API}/clusterqueues", {**_kind("ClusterQueue"), "metadata": {"name": name}, "spec": spec})
        local = {**_kind("LocalQueue"), "metadata": {"name": name}, "spec": {"clusterQueue": name}}
        self._client.create(f"{API}/namespaces/{namespace}/localqueues", local)

    def log(self) -> str:
        return self._processes.log("kueue")

    def _start(self, program: Path) -> None:
        health, metrics, webhook = free_ports(3)
        certificate = trustme.CA().issue_cert("localhost")
        certificate.private_key_pem.write_to_path(self._directory / "tls.key")
        certificate.cert_chain_pems[0].write_to_path(self._directory / "tls.crt")
        config = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": "default",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
            "metrics": {"bindAddress": f"127.0.0.1:{metrics}"},
            "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(self._directory)},
            "internalCertManagement": {"enable": False},
            "leaderElection": {"leaderElect": False},
            "integrations": {"frameworks": ["batch/job"]},
        }
        (self._directory / "config.yaml").write_text(yaml.safe_dump(config))
        flags = [f"--config={self._directory}/config.yaml", "--feature-gates=VisibilityOnDemand=false"]
        command = [str(program), f"--kubeconfig={self._plane.kubeconfig()}", *flags]
        self._processes.start("kueue", ["unshare", "--map-root-user", "--mount", "sh", "-c", OWN_ETC, *command])

        def ready() -> bool:
            try:
                return requests.get(f"http://127.0.0.1:{health}/readyz", timeout=5).ok
            except requests.ConnectionError:
                return False

        self._processes.until("Kueue is ready", ready, START_SECONDS)

    def _served(self) -> set[str]:
        answer = self._client.call("GET", API)
        return {each["name"] for each in answer.json()["resources"]} if answer.ok else set()

    def _release(self, plural: str, thing: Json) -> None:
        """Delete it, whoever has a finalizer on it."""
        metadata = thing["metadata"]
        within = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
        path = f"{API}{within}/{plural}/{metadata['name']}"
        self._client.call("PATCH", path, {"metadata": {"finalizers": None}})
        self._client.delete(path)


def _kind(name: str) -> Json:
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": name}


def _built() -> tuple[Path, Path]:
    """The manager, kept in the cache, and the folder of its kinds. Raises MissingProgramError."""
    module = json.loads(go(MODULE, "mod", "download", "-json", "sigs.k8s.io/kueue"))
    directory = CACHE / "kueue" / module["Version"].removeprefix("v")
    program = directory / PACKAGE.rpartition("/")[2]
    if not program.exists():
        go_build(MODULE, [PACKAGE], directory)
    return program, Path(module["Dir"]) / "config/components/crd/bases"


if __name__ == "__main__":
    end_by_sigterm()
    print(_built()[0])
