"""Compiles kernels: NVRTC to a cubin, nvJitLink where there is something to link. Needs no nvcc, GPU or CUDA headers.

Each source's includes are found here and handed to NVRTC in memory, so what is hashed for the cache is exactly what is
compiled. A build is kept on disk under the hash of the sources, the defines, the target and the compilers' versions.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.gpu_engine.cuda.errors import CudaUnavailableError, KernelBuildError
from services.ring import codegen

try:
    from cuda.bindings import nvjitlink, nvrtc
except ImportError as error:
    raise CudaUnavailableError("the cuda engine needs the CUDA libraries: `make cuda` installs them") from error

KERNELS = Path(__file__).parent / "kernels"
REPOSITORY = Path(__file__).parents[3]
OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-warn-spills")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[>"]', re.MULTILINE)


def default_cache() -> Path:
    """``blink/kernels`` in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "blink" / "kernels"


class Compiler:
    """Builds cubins for one target.

    Args:
        arch: such as ``sm_90a``.
        cache: where builds are kept; None keeps none.
    """

    def __init__(self, arch: str, cache: Path | None = None) -> None:
        self.arch = arch
        self.cache = cache
        self._generated = {"ring_layout.hpp": codegen.render()}

    def build(self, sources: Sequence[str], defines: Mapping[str, int], libraries: Sequence[Path] = ()) -> bytes:
        """The cubin of the named files of ``kernels/``.

        One source without libraries is compiled as a whole program: in relocatable code ptxas ignores setmaxnreg and
        runs wgmma products one after the other, because it can't see what other objects call.

        Args:
            defines: preprocessor constants.
            libraries: archives of device code to link, such as libcudadevrt.a.

        Raises:
            KernelBuildError: with the compiler's log.
        """
        texts = {name: self._read(name) for name in sources}
        headers = self._includes(texts)
        whole = len(sources) == 1 and not libraries
        options = [f"-arch={self.arch}", *OPTIONS, f"-rdc={str(not whole).lower()}"]
        options += (f"-D{name}={value}" for name, value in sorted(defines.items()))
        key = _digest(options, texts, headers, [library.name for library in libraries])
        cached = self.cache / f"{key}.cubin" if self.cache else None
        if cached and cached.is_file():
            return cached.read_bytes()
        objects = {name: _compile(name, text, headers, options) for name, text in texts.items()}
        cubin = objects[sources[0]] if whole else _link(objects, self.arch, libraries)
        if cached:
            write_whole(cached, cubin)
        return cubin

    def _includes(self, texts: Mapping[str, str]) -> dict[str, str]:
        headers: dict[str, str] = {}
        pending = [(name, text) for name, text in texts.items()]
        while pending:
            includer, text = pending.pop()
            for name in INCLUDE.findall(text):
                if name not in headers:
                    headers[name] = self._read(name, includer)
                    pending.append((name, headers[name]))
        return headers

    def _read(self, name: str, includer: str | None = None) -> str:
        if name in self._generated:
            return self._generated[name]
        for folder in (KERNELS, KERNELS / "std", REPOSITORY):
            if (folder / name).is_file():
                return (folder / name).read_text()
        raise KernelBuildError(
            f"{includer} includes {name}, which is not there" if includer else f"no kernel file {name}"
        )


def _digest(options: list[str], texts: Mapping[str, str], headers: Mapping[str, str], libraries: list[str]) -> str:
    versions = [str(_nvrtc("nvrtcVersion", nvrtc.nvrtcVersion())), str(nvjitlink.version())]
    digest = hashlib.sha256()
    for part in (*versions, *options, *libraries):
        digest.update(f"{len(part)}:{part}".encode())
    for name, text in sorted({**headers, **texts}.items()):
        digest.update(f"{len(name)}:{name}{len(text)}:{text}".encode())
    return digest.hexdigest()[:32]


def _compile(name: str, text: str, headers: Mapping[str, str], options: Sequence[str]) -> bytes:
    contents = [content.encode() for content in headers.values()]
    names = [header.encode() for header in headers]
    program = _nvrtc(
        "nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(names), contents, names)
    )
    try:
        encoded = [option.encode() for option in options]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = bytearray(_nvrtc("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(program)))
        _nvrtc("nvrtcGetProgramLog", nvrtc.nvrtcGetProgramLog(program, log))
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelBuildError(f"{name} does not compile ({code.name}):\n{log.decode().rstrip(chr(0))}")
        cubin = bytearray(_nvrtc("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program)))
        _nvrtc("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _link(objects: Mapping[str, bytes], arch: str, libraries: Sequence[Path]) -> bytes:
    handle = nvjitlink.create(1, [f"-arch={arch}"])
    try:
        for name, cubin in objects.items():
            nvjitlink.add_data(handle, nvjitlink.InputType.CUBIN, cubin, len(cubin), name)
        for library in libraries:
            nvjitlink.add_file(handle, nvjitlink.InputType.LIBRARY, str(library))
        nvjitlink.complete(handle)
        linked = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, linked)
        return bytes(linked)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        raise KernelBuildError(f"the kernels do not link ({error}):\n{log.decode().rstrip(chr(0))}") from error
    finally:
        nvjitlink.destroy(handle)


def _nvrtc(call: str, result: tuple[Any, ...]) -> Any:
    code, values = result[0], result[1:]
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelBuildError(f"{call} failed with {code.name}")
    return values[0] if len(values) == 1 else values


def write_whole(path: Path, content: bytes) -> None:
    """Other processes see the whole file or none."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)
