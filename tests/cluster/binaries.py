"""``python -m tests.cluster.binaries [node]``: the programs that a cluster is made of, kept in the cache between runs.

Kubernetes is built from its Go module, which kubernetes/go.mod pins: minutes, once. etcd comes from the distribution.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.fetch_helm import CACHE
from tests.cluster.processes import end_by_sigterm

MODULE = Path(__file__).parent / "kubernetes"
CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE = ("kubelet", "kube-proxy")
BUILD_SECONDS = 3000
BUILDING = "building-"


class MissingProgramError(Exception):
    """A program that the cluster needs can't be had; the message says what to install."""


def kubernetes_version() -> str:
    """As go.mod pins it, for example v1.35.4."""
    found = re.search(r"^\s*(?:require )?k8s\.io/kubernetes (v\S+)", (MODULE / "go.mod").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def kubernetes(programs: Sequence[str] = CONTROL_PLANE) -> Path:
    """Directory of the built programs. Raises MissingProgramError."""
    version = kubernetes_version()
    directory = CACHE / f"kubernetes-{version.removeprefix('v')}"
    missing = [name for name in programs if not (directory / name).exists()]
    if missing:
        package = "k8s.io/component-base/version"
        major, minor, _ = version.removeprefix("v").split(".")
        stamps = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
        stamped = " ".join(f"-X {package}.{name}={value}" for name, value in stamps.items())
        # One build for all, so that what they share is compiled once.
        go_build(MODULE, [f"k8s.io/kubernetes/cmd/{name}" for name in missing], directory, stamped)
    return directory


def go_build(module: Path, packages: Sequence[str], directory: Path, link_flags: str = "") -> None:
    """Programs of what a go.mod pins, into ``directory``. Raises MissingProgramError.

    A build that is ended half way leaves no half of a program; the next one goes on from Go's own cache.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in directory.glob(f"{BUILDING}*"):  # by a build that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=BUILDING, ignore_cleanup_errors=True) as fresh:
            made, scratch = Path(fresh) / "made", Path(fresh) / "scratch"
            made.mkdir()
            scratch.mkdir()
            flags = ["-trimpath", "-mod=readonly", "-ldflags", f"-s -w {link_flags}".strip(), "-o", f"{made}/"]
            go(module, "build", *flags, *packages, scratch=scratch)
            for program in made.iterdir():
                program.replace(directory / program.name)


def go(module: Path, *arguments: str, scratch: Path | None = None) -> str:
    """What the go command prints; what it makes on its way lies in ``scratch``. Raises MissingProgramError."""
    if shutil.which("go") is None:
        raise MissingProgramError("go (1.25 or newer) is needed to build Kubernetes")
    done = subprocess.run(
        ["go", *arguments],
        cwd=module,
        env={**os.environ, "CGO_ENABLED": "0", **({"GOTMPDIR": str(scratch)} if scratch else {})},
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise MissingProgramError(f"go {' '.join(arguments)}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def debian(program: str, package: str) -> Path:
    """A program of the distribution. Raises MissingProgramError."""
    found = shutil.which(program)
    if found is None:
        raise MissingProgramError(f"{program} is needed: apt-get install {package}")
    return Path(found)


if __name__ == "__main__":
    end_by_sigterm()
    print(kubernetes((*CONTROL_PLANE, *NODE) if "node" in sys.argv[1:] else CONTROL_PLANE))
