"""A real node: containerd, kubelet and kube-proxy on this machine, with cgroups of either version. Needs root."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.binaries import NODE, debian, kubernetes
from tests.cluster.control_plane import ADMIN, Client, ControlPlane
from tests.cluster.node.leftovers import (
    CGROUPS,
    end_processes,
    keep_sysctls,
    remove_cgroups,
    restore_sysctls,
    unmount,
)
from tests.cluster.node.names import DOMAIN, Names
from tests.cluster.node.network import CNI, HOST_ADDRESS, INSIDE, NODE_ADDRESS, POD_NETWORK
from tests.cluster.processes import Processes

NAME = "node"
START_SECONDS = 120.0
PAUSE = "localhost/pause:1"
# The kubelet writes these at its start; they are this machine's own again at its end.
SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
)


class Machine:
    """Start it as a context, in a Network. ``directory`` must not lie on an overlay file system."""

    def __init__(self, plane: ControlPlane, directory: Path) -> None:
        self.directory = directory
        self._plane = plane
        self._client: Client = plane.client()
        self._processes = Processes(directory)
        self._names = Names(self._client, self._processes)
        self._socket = directory / "containerd.sock"
        keep_sysctls(directory, SYSCTLS)

    def __enter__(self) -> Machine:
        try:
            self._start_containerd()
            self._names.__enter__()
            self._start_kube_proxy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._names.__exit__()
        self.stop()

    def load(self, archive: Path) -> None:
        """Import an image that ``buildah push docker-archive:`` wrote."""
        self.ctr("images", "import", str(archive))

    def start_kubelet(self, **settings: Any) -> None:
        """With these settings beside the usual ones; waits for the node. Sandboxes' image must have been loaded."""
        (kubelet, _) = NODE
        config = self.directory / "kubelet.yaml"
        config.write_text(yaml.safe_dump(self._kubelet_config() | settings))
        flags = {
            "config": config,
            "kubeconfig": self._plane.kubeconfig(ADMIN),
            "root-dir": self.directory / "kubelet",
            "hostname-override": NAME,
            "node-ip": NODE_ADDRESS,
        }
        self._run(kubelet, [kubernetes(NODE) / kubelet, *(f"--{name}={value}" for name, value in flags.items())])
        self._processes.until("the node is ready", self.ready, START_SECONDS)

    def restart_kubelet(self, **settings: Any) -> None:
        """With others. Pods go on meanwhile; a policy for CPUs may be another one, as its state is thrown away."""
        self._processes.end("kubelet")
        (self.directory / "kubelet" / "cpu_manager_state").unlink()
        self.start_kubelet(**settings)

    def ready(self) -> bool:
        node = self._client.find(f"/api/v1/nodes/{NAME}")
        conditions = node["status"].get("conditions", ()) if node else ()
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def ctr(self, *arguments: str) -> str:
        """containerd's own client, on the kubelet's containers."""
        command = [
            str(debian("ctr", "containerd")),
            "--address",
            str(self._socket),
            "--namespace",
            "k8s.io",
            *arguments,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def log(self, name: str) -> str:
        return self._processes.log(name)

    def diagnosis(self) -> str:
        """The node from inside: rules of Services, tracked connections, neighbours, and the ends of logs."""
        (kubelet, proxy) = NODE
        looks = (
            ("iptables-save", "--table", "nat"),
            ("iptables-save", "--table", "filter"),
            ("conntrack", "--dump", "--proto", "tcp"),
            ("ip", "neighbour"),
            ("ip", "-brief", "address"),
        )
        parts = [f"--- {' '.join(look)}\n{self._inside(*look)}" for look in looks]
        parts += [f"--- {name}\n{self.log(name)}" for name in (proxy, kubelet, "containerd", "dnsmasq")]
        return "\n".join(parts)

    def cgroup_value(self, pod_uid: str, *names: str) -> str:
        """Of a pod: the first of these files that there is; versions of cgroups call them differently."""
        found = (path for name in names for path in CGROUPS.glob(f"**/kubepods/**/pod{pod_uid}/{name}"))
        return next(found).read_text().strip()

    @staticmethod
    def cpus(container: str) -> set[int]:
        """Those that a container may run on, by its id in the API."""
        (_, _, name) = container.partition("//")
        (found,) = CGROUPS.glob(f"**/kubepods/**/{name}/cpuset.cpus")
        ranges = [part.split("-") for part in found.read_text().strip().split(",") if part]
        return {cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)}

    def stop(self) -> None:
        """Kubelet first, then its containers, which outlive it and containerd."""
        self._processes.end("kubelet")
        self._end_containers()
        self._processes.end_all()
        end_processes(self.directory)  # shims, where containerd was not there to end them
        unmount(self.directory)
        restore_sysctls(self.directory)
        remove_cgroups()

    def _end_containers(self) -> None:
        if not self._socket.exists():
            return
        for container in self.ctr("tasks", "list", "--quiet").split():
            subprocess.run(
                ["ctr", f"--address={self._socket}", "--namespace=k8s.io", "tasks", "delete", "--force", container],
                check=False,
                capture_output=True,
                timeout=60,
            )

    @staticmethod
    def _inside(*command: str) -> str:
        done = subprocess.run([*INSIDE, *command], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def _run(self, name: str, command: list[str | Path]) -> None:
        self._processes.start(name, [*INSIDE, *command])

    def _start_containerd(self) -> None:
        networks = self.directory / "cni"
        networks.mkdir()
        (networks / "pods.conflist").write_text(json.dumps(CNI))
        config = self.directory / "containerd.toml"
        config.write_text(f"""
version = 2
root = "{self.directory}/containerd"
state = "{self.directory}/containerd-state"
[grpc]
address = "{self._socket}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{networks}"
""")
        self._run("containerd", [debian("containerd", "containerd"), f"--config={config}"])
        self._processes.until("containerd answers", self._containerd_answers, START_SECONDS)

    def _containerd_answers(self) -> bool:
        return (
            self._socket.exists()
            and not subprocess.run(
                ["ctr", f"--address={self._socket}", "version"], capture_output=True, check=False
            ).returncode
        )

    def _start_kube_proxy(self) -> None:
        config = self.directory / "kube-proxy.yaml"
        settings = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clusterCIDR": POD_NETWORK,
            "clientConnection": {"kubeconfig": str(self._plane.kubeconfig(ADMIN))},
            "hostnameOverride": NAME,
            "oomScoreAdj": 0,
            "conntrack": {"maxPerCore": 0},
            "iptables": {"minSyncPeriod": "200ms"},
        }
        config.write_text(yaml.safe_dump(settings))
        (_, proxy) = NODE
        self._run(proxy, [kubernetes(NODE) / proxy, f"--config={config}"])

    def _kubelet_config(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "address": NODE_ADDRESS,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "clusterDNS": [HOST_ADDRESS],
            "clusterDomain": DOMAIN,
            "resolvConf": "",
            # A full disk of this machine's is not what is tested.
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "volumePluginDir": str(self.directory / "volume-plugins"),
            "podLogsDir": str(self.directory / "pod-logs"),
            "nodeStatusUpdateFrequency": "2s",
            "syncFrequency": "5s",
        }
