"""What the images are made of, and how large they may be."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.binaries import debian
from tests.cluster.node.images import IMAGES, TARGETS, archive

# Shells, package managers, and what gains rights: none of these is needed to serve.
FOREIGN = {"sh", "bash", "dash", "busybox", "apt", "apt-get", "dpkg", "pip", "pip3", "su", "sudo", "mount"}
STORAGE = ("--storage-driver=vfs",)


def files(target: str) -> Iterator[tarfile.TarInfo]:
    """Of all layers of an image."""
    with tarfile.open(archive(target)) as whole:
        for each in whole.getmembers():
            if each.name.endswith(".tar") and each.isfile():
                layer = whole.extractfile(each)
                assert layer is not None
                with tarfile.open(fileobj=layer) as within:
                    yield from within


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_no_shell_no_package_manager_and_nothing_that_gains_rights(target: str) -> None:
    found = list(files(target))
    assert len(found) > 1000
    assert not {Path(each.name).name for each in found} & FOREIGN
    assert not [each.name for each in found if each.isfile() and each.mode & 0o6000]


@pytest.fixture
def storage(tmp_path: Path) -> tuple[str, ...]:
    """buildah's, of this test alone."""
    return (*STORAGE, f"--root={tmp_path}/root", f"--runroot={tmp_path}/run")


def test_an_image_larger_than_its_limit_is_refused_with_both_figures_and_leaves_the_name_to_the_one_before(
    tmp_path: Path, storage: tuple[str, ...]
) -> None:
    name = "localhost/blink:1"

    def buildah(*arguments: str | Path) -> str:
        command: list[str | Path] = [debian("buildah", "buildah"), *storage, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def made_of(size: int) -> str:
        """An image without a name."""
        (tmp_path / "large").write_bytes(bytes(size))
        container = buildah("from", "scratch")
        buildah("copy", container, tmp_path / "large", "/large")
        return buildah("commit", "--quiet", "--rm", "--format", "docker", container)

    def tag(image: str, limit: int) -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [IMAGES / "tag.sh", image, str(limit), name]
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "BUILDAH_FLAGS": " ".join(storage)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def named() -> str:
        return buildah("images", "--quiet", "--no-trunc", name).removeprefix("sha256:")

    small, large = made_of(2_500_000), made_of(3_500_000)
    assert tag(small, 3).stdout == f"{name}: 3 MB of 3 MB\n"
    assert named() == small
    refused = tag(large, 3)
    assert refused.returncode == 1
    assert f"{name} has 4 MB, its limit is 3 MB" in refused.stderr
    assert named() == small
    assert tag(large, 4).returncode == 0
    assert named() == large
