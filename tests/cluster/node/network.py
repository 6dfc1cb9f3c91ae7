"""The node's network: a namespace of its own, so that nothing of kube-proxy's or of CNI's touches this machine's.

    this machine  10.213.0.1 ---veth--- 10.213.0.2  namespace  10.213.1.1 ---bridge--- pods 10.213.1.0/24

The control plane and the tests are on the left; Services (10.0.0.0/24) are reached through kube-proxy on the right.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

NAMESPACE = "blink-node"
HOST_ADDRESS = "10.213.0.1"
NODE_ADDRESS = "10.213.0.2"
POD_GATEWAY = "10.213.1.1"
POD_NETWORK = "10.213.1.0/24"
SERVICE_NETWORK = "10.0.0.0/24"
HOST_DEVICE, NODE_DEVICE = "blink-host", "blink-node0"
# nsenter rather than `ip netns exec`, which would hide /sys/fs/cgroup.
INSIDE = ("nsenter", f"--net=/run/netns/{NAMESPACE}")

CNI = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "pods0",
            "isGateway": True,
            "ipMasq": False,
            "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": POD_NETWORK}]], "routes": [{"dst": "0.0.0.0/0"}]},
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}


class Network:
    """Start it as a context; needs root."""

    def __enter__(self) -> Network:
        self.remove()  # what a run that was killed has left
        _ip("netns", "add", NAMESPACE)
        _ip("link", "add", HOST_DEVICE, "type", "veth", "peer", "name", NODE_DEVICE, "netns", NAMESPACE)
        _ip("address", "add", f"{HOST_ADDRESS}/30", "dev", HOST_DEVICE)
        _ip("link", "set", HOST_DEVICE, "up")
        _ip("-n", NAMESPACE, "address", "add", f"{NODE_ADDRESS}/30", "dev", NODE_DEVICE)
        for device in ("lo", NODE_DEVICE):
            _ip("-n", NAMESPACE, "link", "set", device, "up")
        _ip("-n", NAMESPACE, "route", "add", "default", "via", HOST_ADDRESS)
        for network in (POD_NETWORK, SERVICE_NETWORK):
            _ip("route", "add", network, "via", NODE_ADDRESS)
        switches = ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables")
        write = "; ".join(f"echo 1 > /proc/sys/{switch}" for switch in switches)
        subprocess.run([*INSIDE, "sh", "-c", write], check=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    @staticmethod
    def remove() -> None:
        """The namespace takes its devices and rules with it, the device its routes."""
        for command in (("link", "del", HOST_DEVICE), ("netns", "del", NAMESPACE)):
            subprocess.run(["ip", *command], check=False, capture_output=True)
        for leftover in Path("/run/netns").glob("cni-*"):
            subprocess.run(["ip", "netns", "del", leftover.name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
