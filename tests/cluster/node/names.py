"""Names of Services for pods: dnsmasq, told what the API server has."""

from __future__ import annotations

import contextlib
import signal
import threading

import requests

from tests.cluster.binaries import debian
from tests.cluster.control_plane import Client
from tests.cluster.node.network import HOST_ADDRESS
from tests.cluster.processes import Processes

DOMAIN = "cluster.local"
LOOK_SECONDS = 0.5


class Names:
    """Serves ``NAME.NAMESPACE.svc.cluster.local``; of a Service without an address, its pods'. A context."""

    def __init__(self, client: Client, processes: Processes) -> None:
        self._client = client
        self._processes = processes
        self._file = processes.directory / "services"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Names:
        self._file.touch()
        # As root it would change to a user who can't read the file again.
        self._processes.start(
            "dnsmasq",
            [
                debian("dnsmasq", "dnsmasq-base"),
                *("--keep-in-foreground", "--user=root", "--conf-file=/dev/null", "--no-resolv", "--no-hosts"),
                *(f"--listen-address={HOST_ADDRESS}", "--bind-interfaces", f"--addn-hosts={self._file}"),
                *(f"--local=/{DOMAIN}/", "--local-ttl=1"),
            ],
        )
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            with contextlib.suppress(requests.ConnectionError, AssertionError):  # the API server restarts
                lines = "".join(sorted(self._lines()))
                if lines != self._file.read_text():
                    self._file.write_text(lines)
                    self._processes.signal("dnsmasq", signal.SIGHUP)

    def _lines(self) -> list[str]:
        slices = self._client.items("/apis/discovery.k8s.io/v1/endpointslices")
        lines = []
        for service in self._client.items("/api/v1/services"):
            metadata = service["metadata"]
            addresses = [service["spec"]["clusterIP"]]
            if addresses == ["None"]:
                own = {"kubernetes.io/service-name": metadata["name"]}
                addresses = [
                    address
                    for each in slices
                    if each["metadata"]["namespace"] == metadata["namespace"]
                    and own.items() <= each["metadata"].get("labels", {}).items()
                    for endpoint in each["endpoints"] or ()
                    for address in endpoint["addresses"]
                ]
            lines += [f"{a} {metadata['name']}.{metadata['namespace']}.svc.{DOMAIN}\n" for a in addresses]
        return lines
