"""``python -m tests.cluster.node.preflight`` names what of the kernel or of Debian a node can't have here, a line each.

What it does not name is there: a test of the node that fails then has found a fault. Needs root, iproute2 and iptables.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import requests

from tests.cluster.node.images import IMAGES, built

CGROUPS = Path("/sys/fs/cgroup")
LOCK = IMAGES / "steps" / "debian-amd64.lock"
MIRROR = "http://deb.debian.org"
CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
# Each is tried in a network and a mount namespace of its own, which take away what it has made.
FEATURES = {
    "pairs of network devices (veth)": "ip link add first type veth peer name second",
    "bridges": "ip link add pods type bridge",
    "bridged packets through iptables (br_netfilter)": (
        "ip link add pods type bridge && test -w /proc/sys/net/bridge/bridge-nf-call-iptables"
    ),
    "iptables with NAT": "iptables --table nat --append POSTROUTING --jump MASQUERADE",
    "connection tracking": "iptables --append FORWARD --match conntrack --ctstate INVALID --jump DROP",
    "an overlay file system on this disk": (
        "mkdir lower upper work all && mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work all"
    ),
}


def missing(features: Mapping[str, str] = FEATURES, cgroups: Path = CGROUPS) -> Iterator[str]:
    """What is not there and how that shows, by trying it."""
    yield from (f"cgroup controller {name}" for name in CONTROLLERS if not _controlled(cgroups, name))
    for feature, script in features.items():
        with tempfile.TemporaryDirectory() as scratch:
            command = ["unshare", "--net", "--mount", "sh", "-c", script]
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            yield f"{feature} ({' '.join(done.stderr.split()) or f'exit status {done.returncode}'})"


def gone(lock: Path = LOCK, mirror: str = MIRROR) -> Iterator[str]:
    """Packages that images are made of and that can't be fetched: a mirror keeps only the latest of each."""
    with requests.Session() as session:
        for path in (line.split()[0] for line in lock.read_text().splitlines()):
            try:
                session.head(f"{mirror}/{path}", timeout=60, allow_redirects=True).raise_for_status()
            except requests.RequestException as error:
                yield f"{path} of {lock.name}, which deploy/images/lock.sh writes ({error})"


def _controlled(cgroups: Path, controller: str) -> bool:
    """Whether kubelet can limit by it, in either version of cgroups."""
    together = cgroups / "cgroup.controllers"
    if together.exists():
        return controller in together.read_text().split() and os.access(cgroups / "cgroup.subtree_control", os.W_OK)
    return (cgroups / controller / "cgroup.procs").exists() and os.access(cgroups / controller, os.W_OK)


if __name__ == "__main__":
    for each in (*missing(), *(() if built() else gone())):
        print(each)
