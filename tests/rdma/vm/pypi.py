"""``python -m tests.rdma.vm.pypi``: PyPI's pyverbs with the rdma-core that it brings, compiled; prints its folder.

A wheel made of it leaves rdma-core's libraries out and finds those of the system, which must be of the same version. So
both are compiled here and used where they lie: in the build folder, which the emulated machine sees under that path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from services.common.cpu import available_cpus

VERSION = "59.0"
FOLDER = Path(__file__).parents[3] / f"build/pyverbs-{VERSION}"
CYTHON = "cython>=3.0.12,<3.1"  # what 59.0 asks for, and what it compiles with
# Without libnl, which resolves addresses of unconnected queue pairs.
OPTIONS = ("NO_MAN_PAGES=1", "IN_PLACE=1", "CMAKE_BUILD_TYPE=None", "ENABLE_RESOLVE_NEIGH=0")
_TARGET = re.compile(r"^(python/pyverbs/\w+\.cpython[^/:]*\.so|lib/librxe-rdmav\d+\.so): ", re.MULTILINE)


def folder() -> Path:
    """What goes to the front of ``sys.path``; compiled once, in a few minutes.

    Raises CalledProcessError, or FileNotFoundError when this Python has no headers or no shared library.
    """
    python = FOLDER / "build/python"
    if (FOLDER / "done").exists():
        return python
    shutil.rmtree(FOLDER, ignore_errors=True)
    tools, build = FOLDER / "tools", FOLDER / "build"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--target", str(tools), CYTHON], check=True)
    source = ("--no-deps", "--no-binary", "pyverbs", f"pyverbs=={VERSION}")
    subprocess.run([*pip, "download", "--dest", str(FOLDER), *source], check=True)
    with tarfile.open(FOLDER / f"pyverbs-{VERSION}.tar.gz") as archive:
        archive.extractall(FOLDER, filter="data")
    beside = Path(sys.executable).parent
    cmake, ninja = str(beside / "cmake"), str(beside / "ninja")
    options = [
        *OPTIONS,
        f"PYTHON_EXECUTABLE={sys.executable}",
        f"CYTHON_EXECUTABLE={tools / 'bin/cython'}",
        f"CMAKE_MAKE_PROGRAM={ninja}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tools)}
    configure = [cmake, "-S", str(FOLDER / f"pyverbs-{VERSION}/rdma-core"), "-B", str(build), "-G", "Ninja"]
    configure += [f"-D{option}" for option in options]
    subprocess.run(configure, check=True, stdout=sys.stderr, env=environment)
    known = subprocess.run(
        [ninja, "-C", str(build), "-t", "targets", "all"], check=True, capture_output=True, text=True
    )
    targets = _TARGET.findall(known.stdout)
    if not any("pyverbs" in target for target in targets):
        raise FileNotFoundError(f"pyverbs can't be compiled for {sys.executable}: its headers or libpython are missing")
    compile_them = [ninja, "-C", str(build), f"-j{available_cpus()}", *targets]
    subprocess.run(compile_them, check=True, stdout=sys.stderr, env=environment)
    (FOLDER / "done").touch()
    return python


if __name__ == "__main__":
    print(folder())
