"""A release of the chart, and what tests do with it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from pathlib import Path

import grpc
from blink.v1 import inference_pb2, inference_pb2_grpc

from tests.cluster.control_plane import Client, ControlPlane, Json
from tests.cluster.fetch_helm import helm, kubectl
from tests.cluster.scene import eventually
from tests.deploy.chart.rendering import CHART, profile

NAME, NAMESPACE = "blink", "serving"
WAIT = "300s"
CONNECT_SECONDS = 1.0
# Room for two of everything and a tenant on two cores.
VALUES: Json = {
    "engine": {"resources": {"requests": {"cpu": "200m", "memory": "1Gi"}}},
    "gateway": {"resources": {"requests": {"cpu": "100m"}}, "drainSeconds": 10},
    "operator": {"settings": {"interval": 1}},
}


class Release:
    """``models`` is a folder of the node's that holds the model."""

    def __init__(self, plane: ControlPlane, models: Path) -> None:
        self.client: Client = plane.client()
        self._kubeconfig = plane.kubeconfig()
        volume = {"pull": False, "volume": {"hostPath": {"path": str(models), "type": "Directory"}}}
        self._values: Json = {**VALUES, "model": volume}

    def install(self) -> None:
        self.helm("install", NAME, str(CHART), "--create-namespace", *profile("cpu-demo"), "--wait", "--timeout", WAIT)
        self.until_reached()

    def upgrade(self, **values: str) -> None:
        """Change single values, and wait until all pods have them."""
        changed = [f"--set={name.replace('__', '.')}={value}" for name, value in values.items()]
        flags = ["--reuse-values", "--wait", "--timeout", WAIT, *changed]
        self.helm("upgrade", NAME, str(CHART), *flags)

    def helm(self, *arguments: str) -> str:
        """Values are given to what installs. Fails with what the cluster says."""
        values = ["--values", "-"] if arguments[0] == "install" else []
        command = [str(helm()), *arguments, *values, "--namespace", NAMESPACE, f"--kubeconfig={self._kubeconfig}"]
        done = subprocess.run(command, input=json.dumps(self._values), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}\n{self.diagnosis()}"
        return done.stdout

    def kubectl(self, *arguments: str) -> str:
        command = [str(kubectl()), f"--kubeconfig={self._kubeconfig}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def passes(self, deployment: str, container: str, command: list[str]) -> bool:
        """Whether the command ends well in a container."""
        inside = [
            "exec",
            f"deployment/{deployment}",
            "--namespace",
            NAMESPACE,
            f"--container={container}",
            "--",
            *command,
        ]
        called = [str(kubectl()), f"--kubeconfig={self._kubeconfig}", *inside]
        return subprocess.run(called, capture_output=True, check=False).returncode == 0

    def diagnosis(self) -> str:
        """Pods, what stands behind Services, events and the ends of logs."""
        command = [str(kubectl()), f"--kubeconfig={self._kubeconfig}"]
        parts = (
            ("get", "pods", "--all-namespaces", "--output=wide"),
            ("get", "services,endpointslices,poddisruptionbudgets", "--all-namespaces", "--output=wide"),
            ("describe", "pods", "--namespace", NAMESPACE),
            ("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"),
            (
                "logs",
                "--namespace",
                NAMESPACE,
                f"--selector=app.kubernetes.io/instance={NAME}",
                "--all-containers",
                "--tail=20",
            ),
        )
        texts = [subprocess.run([*command, *p], capture_output=True, text=True, check=False) for p in parts]
        return "\n".join(f"{each.stdout[-6000:]}{each.stderr}" for each in texts)

    def address(self) -> str:
        """Of the gateway's Service."""
        service = self.client.get(f"/api/v1/namespaces/{NAMESPACE}/services/{NAME}")
        return f"{service['spec']['clusterIP']}:50051"

    def until_reached(self) -> None:
        """Where no gateway was ready and one has become so: wait until its Service takes a connection.

        kube-proxy follows readiness a moment later and, with iptables, in two steps: the rule that refuses goes before
        the one that translates comes. A connection begun in between is tracked without translation and never answered,
        however often its SYN is sent again; so each look is a connection of its own.
        """
        host, port = self.address().split(":")

        def taken() -> bool:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS):
                return True
            return False

        eventually(taken, self.diagnosis)

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        """Greedy, streamed by the installed gateway; the model's tokens."""
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=inference_pb2.SamplingParams(temperature=0.0),
            stop=inference_pb2.StopConditions(max_tokens=tokens, ignore_eos=True),
        )
        with grpc.insecure_channel(self.address()) as channel:
            stream = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=120)
            return [index for event in stream for index in event.chunk.token_ids]

    def pods(self, component: str) -> list[Json]:
        selector = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component={component}"
        return self.client.items(f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={selector}")

    def remove(self) -> None:
        """Whatever is left of it."""
        command = [str(helm()), "uninstall", NAME, "--namespace", NAMESPACE, "--ignore-not-found"]
        subprocess.run([*command, f"--kubeconfig={self._kubeconfig}"], capture_output=True, check=False)
