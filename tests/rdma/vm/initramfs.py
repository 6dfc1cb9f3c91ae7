"""The emulated machine's root file system: a cpio archive (newc) of what the packages hold."""

from __future__ import annotations

import compileall
import os
import py_compile
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from tests.rdma.vm.packages import MachineUnavailableError

# crc32_generic is no dependency of rdma_rxe, but its first `rdma link add` asks for it.
MODULES = ("virtio_pci", "9p", "9pnet_virtio", "crc32_generic", "ib_uverbs", "rdma_rxe", "veth")
_KEPT = ("bin", "sbin", "etc", "lib", "lib64", "usr/bin", "usr/sbin", "usr/lib")
_LEFT_OUT = ("lib/modules", "lib/udev", "usr/lib/x86_64-linux-gnu/perl", "usr/lib/x86_64-linux-gnu/gconv")
_FOLDERS = ("dev", "proc", "sys", "tmp", "root", "run")


def build(root: Path, init: Path, exports: str, target: Path) -> None:
    """Write the archive of ``root`` with ``init`` as its /init, shell ``exports`` for it and MODULES in /modules."""
    scratch = target.with_suffix(f".{os.getpid()}")
    with scratch.open("wb") as file:
        for inode, (name, mode, data) in enumerate(_entries(root, init, exports), start=1):
            file.write(_record(inode, name, mode, data))
        file.write(_record(0, "TRAILER!!!", 0, b""))
    scratch.rename(target)


def prepare(root: Path) -> None:
    """Delete what ``build`` leaves out, most of it modules of other hardware, and compile Debian's Python packages.

    Debian compiles them when it installs them, which nobody does here; the emulated processor would take seconds for it
    at each start of a Python. What this Python compiles serves only one of its version.
    """
    for library in (root / "usr/lib").glob("python3*"):
        compileall.compile_dir(
            library,
            quiet=2,
            stripdir=str(root),
            prependdir="/",
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    kept = set(_in_order_of_loading(root))
    for path in (root / "lib/modules").rglob("*.ko"):
        if path not in kept:
            path.unlink()
    for name in ("usr/share", "var", "usr/include"):
        shutil.rmtree(root / name, ignore_errors=True)


def _entries(root: Path, init: Path, exports: str) -> Iterator[tuple[str, int, bytes]]:
    """(path, mode, contents) of every file, folders before what they hold."""
    for name in _FOLDERS:
        yield name, stat.S_IFDIR | 0o755, b""
    yield "init", stat.S_IFREG | 0o755, init.read_bytes()
    yield "exports", stat.S_IFREG | 0o644, exports.encode()
    yield "modules", stat.S_IFDIR | 0o755, b""
    for number, path in enumerate(_in_order_of_loading(root)):
        yield f"modules/{number:02}-{path.name}", stat.S_IFREG | 0o644, path.read_bytes()
    yield "usr", stat.S_IFDIR | 0o755, b""
    for top in _KEPT:
        if (root / top).exists():
            yield from _tree(root, root / top)


def _tree(root: Path, path: Path) -> Iterator[tuple[str, int, bytes]]:
    name = str(path.relative_to(root))
    if name.startswith(_LEFT_OUT):
        return
    if path.is_symlink():
        yield name, stat.S_IFLNK | 0o777, os.fsencode(path.readlink())
    elif path.is_dir():
        yield name, stat.S_IFDIR | 0o755, b""
        for child in sorted(path.iterdir()):
            yield from _tree(root, child)
    else:
        yield name, stat.S_IFREG | stat.S_IMODE(path.stat().st_mode), path.read_bytes()


def _in_order_of_loading(root: Path) -> list[Path]:
    """MODULES after what they depend on, which each module's own ``depends=`` says."""
    found = {path.stem.replace("-", "_"): path for path in (root / "lib/modules").rglob("*.ko")}
    ordered: dict[str, Path] = {}

    def add(name: str) -> None:
        if name in ordered:
            return
        if name not in found:
            raise MachineUnavailableError(f"the kernel has no module {name}")
        depends = re.search(rb"\0depends=([^\0]*)\0", found[name].read_bytes())
        for other in (depends[1].decode() if depends else "").split(","):
            if other:
                add(other.replace("-", "_"))
        ordered[name] = found[name]

    for name in MODULES:
        add(name)
    return list(ordered.values())


def _record(inode: int, name: str, mode: int, data: bytes) -> bytes:
    """One file in cpio's newc format: a header of hexadecimal fields, name and contents padded to 4 bytes."""
    encoded = os.fsencode(name) + b"\0"
    fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + encoded
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
