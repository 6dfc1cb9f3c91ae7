"""The images that the chart installs, built by the command that the docs give, without a registry.

Each is an archive in the cache, under a name that changes with what it is made of; ``python -m
tests.cluster.node.images`` makes those that are missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests.cluster.binaries import debian
from tests.cluster.fetch_helm import CACHE
from tests.cluster.processes import end_by_sigterm

REPOSITORY = Path(__file__).parents[3]
IMAGES = REPOSITORY / "deploy" / "images"
SOURCES = (
    *("CMakeLists.txt", "pyproject.toml", "proto", "services", "requirements"),
    *("deploy/images/Containerfile", "deploy/images/steps"),
)
TARGETS = ("gateway", "engine-cpu", "operator")
VERSION = "0.1.0"
# Overlay is quick; what lies on a file system without it (another overlay) names vfs.
STORAGE = (f"--storage-driver={os.environ.get('STORAGE_DRIVER', 'overlay')}", f"--root={CACHE}/storage")
BASE = "localhost/blink/base"
AUTHORITY = Path("/etc/ssl/certs/ca-certificates.crt")  # a network may have one of its own
BUILD_SECONDS = 3000

# What holds a pod's namespaces: Kubernetes has an image for it, here is no registry to get it from.
PAUSE_SOURCE = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int) { _exit(0); }
static void reap(int) { while (waitpid(-1, nullptr, WNOHANG) > 0) {} }
int main() {
  signal(SIGTERM, end);
  signal(SIGINT, end);
  signal(SIGCHLD, reap);
  for (;;) pause();
}
"""


def archives() -> list[Path]:
    """All that a node needs for the chart, built where they are not in the cache. Raises MissingProgramError."""
    return [*(archive(target) for target in TARGETS), _pause(CACHE / "images")]


def archive(target: str, arch: str = "amd64") -> Path:
    """One image of Blink's, for amd64 or arm64. Raises MissingProgramError."""
    path = _path(target, arch)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{target}-{arch}-*.tar"):
            old.unlink()
        environment = _environment(arch)
        if not _buildah("images", "--quiet", BASE, check=False):
            subprocess.run([IMAGES / "base.sh"], env=environment, check=True, timeout=BUILD_SECONDS)
        tag = f"{VERSION}-{arch}"
        command: list[str | Path] = [IMAGES / "build.sh", target, tag]
        subprocess.run(command, env=environment, check=True, timeout=BUILD_SECONDS)
        _save(f"localhost/blink/{target}:{tag}", f"docker.io/blink/{target}:{VERSION}", path)
    return path


def built() -> bool:
    """Whether all images are in the cache."""
    return all(_path(target, "amd64").exists() for target in TARGETS)


def _path(target: str, arch: str) -> Path:
    return CACHE / "images" / f"{target}-{arch}-{_key()}.tar"


def configuration(target: str) -> dict[str, Any]:
    """What an image's archive says of how to run it: User, Healthcheck, Entrypoint."""
    with tarfile.open(archive(target)) as files:

        def read(name: str) -> Any:
            found = files.extractfile(name)
            assert found is not None
            return json.load(found)

        (image,) = read("manifest.json")
        config: dict[str, Any] = read(image["Config"])["config"]
        return config


def _environment(arch: str) -> dict[str, str]:
    flags = f"--volume {AUTHORITY}:/authority.pem:ro --build-arg PIP_CERT=/authority.pem" if AUTHORITY.exists() else ""
    return {**os.environ, "ARCH": arch, "BASE": BASE, "BUILDAH_FLAGS": " ".join(STORAGE), "BUILD_FLAGS": flags}


def _key() -> str:
    digest = hashlib.sha256()
    for source in SOURCES:
        top = REPOSITORY / source
        for path in sorted([top] if top.is_file() else top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _pause(directory: Path) -> Path:
    """A static program alone in an image."""
    path = directory / f"pause-{hashlib.sha256(PAUSE_SOURCE.encode()).hexdigest()[:16]}.tar"
    if not path.exists():
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "pause.cpp").write_text(PAUSE_SOURCE)
            compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
            subprocess.run([compiler, "-Os", "-static", "-o", "pause", "pause.cpp"], cwd=scratch, check=True)
            container = _buildah("from", "scratch")
            _buildah("copy", container, f"{scratch}/pause", "/pause")
            _buildah("config", "--entrypoint", '["/pause"]', container)
            _buildah("commit", "--rm", container, "localhost/pause:1")
        _save("localhost/pause:1", "localhost/pause:1", path)
    return path


def _save(image: str, name: str, path: Path) -> None:
    partial = path.with_suffix(".partial")
    _buildah("push", "--quiet", image, f"docker-archive:{partial}:{name}")
    partial.rename(path)


def _buildah(*arguments: str, check: bool = True) -> str:
    command: list[str | Path] = [debian("buildah", "buildah"), *STORAGE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check).stdout.strip()


if __name__ == "__main__":
    end_by_sigterm()
    print(*archives(), sep="\n")
