"""Every kernel compiles and links for Hopper without a GPU, and builds are cached by what they are made of."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs the CUDA compilers of blink[cuda]")

from services.gpu_engine.cuda import compiler, fp8_products, skinny_gemm, skinny_schedule, wide_schedule, wide_swiglu
from services.gpu_engine.cuda.compiler import KERNELS, Compiler
from services.gpu_engine.cuda.errors import KernelBuildError
from services.gpu_engine.cuda.fused_decode import WIDTHS as FUSED_WIDTHS
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.cuda.kernels import SOURCES
from services.gpu_engine.cuda.mixture import MIXTURE_SOURCES
from services.gpu_engine.models.config import MixtureConfig
from tests.gpu.steps import config

GEOMETRIES = {
    "SmolLM2-135M": Geometry(config(hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocabulary=49152)),
    "Llama-3-8B": Geometry(config(hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocabulary=128256)),
    "group of 8, page of 128": Geometry(config(hidden=5120, heads=64, kv_heads=8, head_dim=128), page_size=128),
    "Phi-4 15B": Geometry(config(hidden=5120, heads=40, kv_heads=10, head_dim=128, ffn=17920, vocabulary=100352)),
    "Qwen3-32B": Geometry(config(hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25600, vocabulary=151936)),
    "group of 5, three quarters rotated": Geometry(config(heads=10, kv_heads=2, head_dim=128, partial_rotary=0.75)),
    "Llama-3-8B, FP8 pages": Geometry(config(hidden=4096, heads=32, kv_heads=8, head_dim=128), kv_cache="fp8"),
    "FP8 pages of 128, heads of 64": Geometry(config(heads=9, kv_heads=3, head_dim=64), 128, "fp8"),
    "group of 1, odd vocabulary": Geometry(config(heads=4, kv_heads=4, head_dim=64, vocabulary=32003)),
}


CONSTANT = re.compile(r'extern "C" __device__ [\w ]+ (\w+)(?:\[\d+\])? =')
ENTRY = re.compile(r'extern "C" __global__ void\s*(?:__launch_bounds__\([^)]*\))?\s*(\w+)\(')


def build(geometry: Geometry, sources: Sequence[str], arch: str = "sm_90a") -> None:
    """Each source's cubin holds its entry points."""
    defines = geometry.defines() | {"BLINK_VOCABULARY": geometry.config.vocabulary}
    for source in sources:
        cubin = Compiler(arch).build([source], defines)
        entries = ENTRY.findall((KERNELS / source).read_text())
        assert entries
        assert all(b".text." + entry.encode() + b"\0" in cubin for entry in entries)
        assert {*CONSTANT.findall((KERNELS / source).read_text())} <= symbols(cubin)


def sections(elf: bytes) -> list[tuple[int, ...]]:
    """The headers of an ELF64 file."""
    table, entry_bytes, count = struct.unpack_from("<Q", elf, 40)[0], *struct.unpack_from("<HH", elf, 58)
    return [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry_bytes) for i in range(count)]


def symbols(elf: bytes) -> set[str]:
    """Names that the driver can look up in an ELF64 file: a constant that no kernel reads may have been dropped."""
    headers = sections(elf)
    found = set()
    for _, kind, _, _, start, size, link, _, _, each in headers:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = headers[link][4]
        for at in range(start, start + size, each):
            (name,) = struct.unpack_from("<I", elf, at)
            found.add(elf[names + name : elf.index(b"\0", names + name)].decode())
    return found


def stack_bytes(elf: bytes) -> list[int]:
    """Of a thread, for each function of a cubin: what registers don't hold is spilled there."""
    found = []
    for _, kind, _, _, start, size, *_ in sections(elf):
        at = start if kind == 0x70000000 else start + size  # SHT_CUDA_INFO
        while at < start + size:
            form, attribute, nbytes = struct.unpack_from("<BBH", elf, at)
            if (form, attribute) == (4, 0x11):  # EIFMT_SVAL, EIATTR_FRAME_SIZE: of a symbol, bytes
                found.append(struct.unpack_from("<I", elf, at + 8)[0])
            at += 4 + (nbytes if form == 4 else 0)
    return found


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_every_model_kernel_compiles_for_hopper(geometry: Geometry) -> None:
    build(geometry, SOURCES)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "group of 1, odd vocabulary"])
def test_sampling_compiles_for_hopper(name: str) -> None:
    build(GEOMETRIES[name], ["sampling.cu"])


@pytest.mark.parametrize("tokens", skinny_schedule.WIDTHS)
def test_skinny_products_compile_for_hopper(tokens: int) -> None:
    source = "skinny_gemm.cu"
    cubin = Compiler("sm_90a").build([source], {"BLINK_SKINNY_TOKENS": tokens})
    assert set(ENTRY.findall((KERNELS / source).read_text())) == set(skinny_gemm.KERNELS)
    assert all(b".text." + entry.encode() + b"\0" in cubin for entry in skinny_gemm.KERNELS)


@pytest.mark.parametrize("tokens", skinny_schedule.WIDTHS)
def test_skinny_products_of_fp8_weights_compile_for_hopper(tokens: int) -> None:
    source = "skinny_fp8.cu"
    cubin = Compiler("sm_90a").build([source], {"BLINK_SKINNY_TOKENS": tokens})
    assert set(ENTRY.findall((KERNELS / source).read_text())) == set(fp8_products.KERNELS)
    assert all(b".text." + entry.encode() + b"\0" in cubin for entry in fp8_products.KERNELS)


@pytest.mark.parametrize("tile", wide_schedule.TILES, ids=str)
def test_wide_products_compile_for_hopper_and_spill_no_registers(tile: wide_schedule.WideTile) -> None:
    cubin = Compiler("sm_90a").build(["wide_swiglu.cu"], tile.defines)
    assert b".text." + wide_swiglu.KERNEL.encode() + b"\0" in cubin
    assert stack_bytes(cubin) == [0]


def test_the_dequantizing_kernel_compiles_for_hopper() -> None:
    build(GEOMETRIES["SmolLM2-135M"], ["dequantize_fp8.cu"])


@pytest.mark.parametrize("source", MIXTURE_SOURCES)
def test_mixtures_compile_for_hopper(source: str) -> None:
    mixture = MixtureConfig(experts=128, per_token=8, ffn=768, normalized=True)
    model = config(architecture="qwen3_moe", hidden=2048, heads=32, kv_heads=4, head_dim=128, mixture=mixture)
    build(Geometry(model), [source])


def test_what_holds_the_device_while_products_are_chosen_compiles() -> None:
    build(GEOMETRIES["SmolLM2-135M"], ["hold.cu"])


@pytest.mark.parametrize("width", FUSED_WIDTHS)
@pytest.mark.parametrize("name", ["SmolLM2-135M", "Llama-3-8B", "Llama-3-8B, FP8 pages"])
def test_the_fused_step_compiles_for_hopper(name: str, width: int) -> None:
    geometry = GEOMETRIES[name]
    cubin = Compiler("sm_90a").build(("fused_decode.cu",), geometry.defines() | {"BLINK_SKINNY_TOKENS": width})
    assert cubin.startswith(b"\x7fELF")


def test_no_kernel_is_left_out() -> None:
    products = {"dequantize_fp8.cu", "skinny_fp8.cu", "skinny_gemm.cu", "wide_swiglu.cu"}
    others = {"fused_decode.cu", "hold.cu", "sampling.cu"}
    assert {*SOURCES, *MIXTURE_SOURCES, *products, *others} == {path.name for path in KERNELS.glob("*.cu")}


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_attention_refuses_what_is_not_hopper(arch: str) -> None:
    with pytest.raises(KernelBuildError, match="attention needs a Hopper GPU"):
        build(GEOMETRIES["Llama-3-8B"], ["attention.cu"], arch)


def test_a_build_is_cached_until_a_header_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, cache = tmp_path / "kernels", tmp_path / "cache"
    kernels.mkdir()
    (kernels / "two.cuh").write_text("#pragma once\n#define TWO 2\n")
    source = '#include "two.cuh"\nextern "C" __global__ void twice(int* x) { *x *= TWO * SCALE; }\n'
    (kernels / "twice.cu").write_text(source)
    monkeypatch.setattr(compiler, "KERNELS", kernels)
    first = Compiler("sm_90a", cache).build(["twice.cu"], {"SCALE": 1})
    (built,) = cache.iterdir()
    built.write_bytes(b"from the cache")
    assert Compiler("sm_90a", cache).build(["twice.cu"], {"SCALE": 1}) == b"from the cache"
    assert Compiler("sm_90a", cache).build(["twice.cu"], {"SCALE": 3}) != first
    (kernels / "two.cuh").write_text("#pragma once\n#define TWO 4\n")
    assert Compiler("sm_90a", cache).build(["twice.cu"], {"SCALE": 1}) != first
    assert len(list(cache.iterdir())) == 3


def test_errors_name_the_source_and_hold_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.cu").write_text("__global__ void broken() { undeclared(); }\n")
    (tmp_path / "lost.cu").write_text('#include "nowhere.cuh"\n')
    (tmp_path / "alone.cu").write_text("__global__ void g() {}\n")
    (tmp_path / "loose.cu").write_text(
        'extern "C" __device__ int absent();\n__global__ void f(int* x) { *x = absent(); }'
    )
    monkeypatch.setattr(compiler, "KERNELS", tmp_path)
    with pytest.raises(KernelBuildError, match=r"(?s)broken\.cu does not compile.*undeclared"):
        Compiler("sm_90a").build(["broken.cu"], {})
    with pytest.raises(KernelBuildError, match=r"lost\.cu includes nowhere\.cuh"):
        Compiler("sm_90a").build(["lost.cu"], {})
    with pytest.raises(KernelBuildError, match=r"(?s)do not link.*absent"):
        Compiler("sm_90a").build(["loose.cu", "alone.cu"], {})
