"""An aarch64 userland to run a gateway in: Debian packages and wheels, unpacked in a cache; never installed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from tests.cluster.node import images

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("python3", "libpython3-dev", "libstdc++6")
TOOLS = {"qemu-aarch64-static": "qemu-user-static", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu"}
PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_28_aarch64", "manylinux_2_34_aarch64")
REQUIREMENTS = REPOSITORY / "requirements/runtime.txt"


class Userland:
    """``root`` is Debian's; ``site`` holds the packages of requirements/runtime.txt, and Blink."""

    def __init__(self, root: Path, site: Path) -> None:
        self.root, self.site = root, site

    def python(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start the aarch64 Python with Blink's packages; its stderr can be read."""
        (python,) = self.root.glob("usr/bin/python3.[0-9][0-9]")
        return subprocess.Popen(
            ["qemu-aarch64-static", "-L", str(self.root), str(python), *arguments],
            cwd=self.site,  # not in the repository, whose extensions are of another processor
            env={**os.environ, "PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1", **environment},
            stderr=subprocess.PIPE,
            text=True,
        )


class Image(Userland):
    """The gateway's image for linux/arm64, unpacked in the cache."""

    def __init__(self) -> None:
        """Raises what building it does."""
        archive = images.archive("gateway", "arm64")
        folder = _base() / archive.stem
        if not folder.exists():
            for old in _base().glob("gateway-arm64-*"):
                shutil.rmtree(old)
            scratch = folder.with_suffix(f".{os.getpid()}")
            _unpack_image(archive, scratch)
            scratch.rename(folder)
        super().__init__(folder, folder / "usr/local/lib/python3.11/dist-packages")


class Installed(Userland):
    """The same by hand: Debian's packages, wheels and the ring's C++ extension."""

    def __init__(self) -> None:
        """Raises CalledProcessError or FileNotFoundError naming what is missing."""
        for tool, package in TOOLS.items():
            if shutil.which(tool) is None:
                raise FileNotFoundError(f"{tool} is missing: apt-get install {package}")
        base = _base()
        sources = (REQUIREMENTS, REPOSITORY / "services/ring/atomics.cpp", Path(__file__))
        key = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
        folder = base / key
        super().__init__(folder / "root", folder / "site")
        if not folder.exists():
            for old in base.glob("[0-9a-f]" * 16):
                shutil.rmtree(old)
            scratch = base / f"{key}.{os.getpid()}"
            _unpack_debian(scratch)
            _unpack_wheels(scratch)
            _compile_extension(scratch)
            scratch.rename(folder)
        _copy_services(folder)
        link = self.site / "blink"
        if not link.exists():  # the API's stubs, which are plain Python
            link.symlink_to(Path(sysconfig.get_path("platlib")) / "blink")


def _base() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blink" / "aarch64"


def _unpack_image(archive: Path, folder: Path) -> None:
    """The layers of an archive that ``buildah push docker-archive:`` wrote; none of Blink's removes anything."""
    folder.mkdir(parents=True)
    with tarfile.open(archive) as whole:
        manifest = whole.extractfile("manifest.json")
        assert manifest is not None
        for layer in json.load(manifest)[0]["Layers"]:
            with tarfile.open(fileobj=whole.extractfile(layer)) as files:
                files.extractall(folder, filter="tar")


def _unpack_debian(folder: Path) -> None:
    state, archives = folder / "apt", folder / "archives"
    for path in (state / "lists/partial", state / "cache", archives):
        path.mkdir(parents=True)
    apt = [
        *("apt-get", "-qq", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64"),
        *("-o", f"Dir::State::lists={state}/lists", "-o", f"Dir::Cache={state}/cache"),
        *("-o", "Dir::State::status=/dev/null", "-o", "APT::Install-Recommends=false", "-o", "Debug::NoLocking=1"),
    ]
    subprocess.run([*apt, "update"], check=True)
    plan = subprocess.run([*apt, "-s", "install", *PACKAGES], check=True, capture_output=True, text=True).stdout
    names = [
        f"{name}={version.lstrip('(')}"
        for action, name, version, *_ in (line.split() for line in plan.splitlines() if line.startswith("Inst "))
    ]
    subprocess.run([*apt, "download", *names], check=True, cwd=archives, stderr=subprocess.DEVNULL)
    for archive in archives.iterdir():
        subprocess.run(["dpkg-deb", "--extract", str(archive), str(folder / "root")], check=True)
    shutil.rmtree(archives)
    shutil.rmtree(state)


def _unpack_wheels(folder: Path) -> None:
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps", "--only-binary=:all:"]
    abi = f"cp{sys.version_info.major}{sys.version_info.minor}"
    target = ["--implementation", "cp", "--abi", abi, "--abi", "abi3", "--abi", "none"]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    version = f"--python-version={sys.version_info.major}.{sys.version_info.minor}.2"
    subprocess.run([*pip, *target, *platforms, version, "--dest", str(wheels), "-r", str(REQUIREMENTS)], check=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
    shutil.rmtree(wheels)


def _compile_extension(folder: Path) -> None:
    """The ring's loads and stores, the one extension that a gateway imports."""
    found = find_spec("nanobind")
    assert found is not None
    assert found.origin is not None
    library = Path(found.origin).parent
    headers = [path.parent for path in folder.glob("root/usr/include/**/pyconfig.h")]
    includes = [*headers, folder / "root/usr/include", library / "include", library / "ext/robin_map/include"]
    name = f"_atomics.cpython-{sys.version_info.major}{sys.version_info.minor}-aarch64-linux-gnu.so"
    subprocess.run(
        [
            *("aarch64-linux-gnu-g++", "-shared", "-fPIC", "-std=c++17", "-O1", "-fvisibility=hidden", "-DNDEBUG"),
            *(f"-I{path}" for path in (*includes, REPOSITORY)),
            str(library / "src/nb_combined.cpp"),
            str(REPOSITORY / "services/ring/atomics.cpp"),
            *("-o", str(folder / name)),
        ],
        check=True,
    )


def _copy_services(folder: Path) -> None:
    """What a gateway is made of, as it is now, and its extension."""
    services = folder / "site/services"
    shutil.rmtree(services, ignore_errors=True)
    for package in ("common", "ring", "dpu_gateway"):
        shutil.copytree(REPOSITORY / "services" / package, services / package)
    for extension in folder.glob("*.so"):
        shutil.copy(extension, services / "ring")
