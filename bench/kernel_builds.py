"""What the engine, the benches and the GPU tests compile: sources of kernels with their preprocessor constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.gpu_engine.cuda.compiler import Compiler
from services.gpu_engine.cuda.control_loop import build as control_loop
from services.gpu_engine.cuda.fused_decode import SOURCE as FUSED_SOURCE
from services.gpu_engine.cuda.fused_decode import WIDTHS as FUSED_WIDTHS
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.host_loop.loop import SOURCE as HOST_LOOP
from services.gpu_engine.cuda.kernels import SOURCES
from services.gpu_engine.cuda.mixture import MIXTURE_SOURCES
from services.gpu_engine.cuda.skinny_schedule import WIDTHS
from services.gpu_engine.cuda.wide_schedule import TILES

LOOP_THREADS = (256, 512)


@dataclass(frozen=True)
class Build:
    """One call of the compiler.

    Attributes:
        runtime: it is linked with the device runtime.
    """

    sources: tuple[str, ...]
    defines: tuple[tuple[str, int], ...]
    runtime: bool = False

    @classmethod
    def of(cls, sources: Sequence[str], defines: Mapping[str, int], *, runtime: bool = False) -> Build:
        return cls(tuple(sources), tuple(sorted(defines.items())), runtime)

    def compile(self, arch: str, cache: Path) -> None:
        """Into the cache, unless it is there. Raises KernelBuildError."""
        libraries = (control_loop.device_runtime(),) if self.runtime else ()
        Compiler(arch, cache).build(self.sources, dict(self.defines), libraries)

    def as_json(self) -> dict[str, Any]:
        return {"sources": self.sources, "defines": dict(self.defines), "runtime": self.runtime}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Build:
        return cls.of(fields["sources"], fields["defines"], runtime=fields["runtime"])


def builds_of(geometry: Geometry) -> Iterator[Build]:
    """Of a model's step."""
    defines = geometry.defines()
    for source in (*SOURCES, *(MIXTURE_SOURCES if geometry.config.mixture else ())):
        yield Build.of((source,), defines)
    yield Build.of(("sampling.cu",), {"BLINK_VOCABULARY": geometry.config.vocabulary})
    for width in WIDTHS:
        yield Build.of(("skinny_gemm.cu",), {"BLINK_SKINNY_TOKENS": width})
    for tile in TILES:
        yield Build.of(("wide_swiglu.cu",), tile.defines)
    for width in () if geometry.config.mixture else FUSED_WIDTHS:
        yield Build.of((FUSED_SOURCE,), defines | {"BLINK_SKINNY_TOKENS": width})


def other_builds() -> Iterator[Build]:
    """Control loops, and kernels that only tests and benches have."""
    for threads in LOOP_THREADS:
        for trace in (0, 1):
            defines = {"BLINK_LOOP_THREADS": threads, "BLINK_TRACE": trace}
            yield Build.of((control_loop.SOURCE,), defines, runtime=True)
    around = "tests/gpu/stand_in_step.cu", "bench/step_times.cu", "bench/control_loop_step.cu"
    for source in (HOST_LOOP, "hold.cu", *around):
        yield Build.of((source,), {})


def bench_builds() -> Iterator[Build]:
    """Of the benches' models, and of the triggers that bench/overlap.py compares."""
    from bench.engine_process import SMALL_MODELS  # noqa: PLC0415 (which imports the driver's bindings)
    from bench.families import MODELS  # noqa: PLC0415

    for config in (*MODELS.values(), *SMALL_MODELS.values()):
        yield from builds_of(Geometry(config))
    llama = Geometry(MODELS["llama3-8b"])
    yield from builds_of(replace(llama, kv_cache="fp8"))  # bench/attention.py and bench/gpu_kernels.py
    yield from builds_of(replace(llama, page_size=128))  # bench/attention.py
    for build in builds_of(llama):
        for trigger in (1, 2):
            yield Build.of(build.sources, {**dict(build.defines), "BLINK_TRIGGER": trigger})
