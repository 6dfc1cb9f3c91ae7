"""A pytest plugin for a machine without a GPU: ``pytest -p bench.dry_gpu --builds FILE tests/gpu``.

GPU tests run up to their first launch, where each ends, so what they would compile is known: each build is written to
FILE, one JSON object a line, instead of being compiled. torch and transformers need not be there: a test that makes a
model of theirs ends with that model's builds. What this misses is compiled later, on the GPU machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import families
from bench.kernel_builds import Build, builds_of
from services.gpu_engine.cuda import compiler, cublas_lt, driver
from services.gpu_engine.cuda.fused_decode import CFusedLayer, CFusedModel
from services.gpu_engine.cuda.geometry import Geometry
from services.gpu_engine.models.checkpoint import FAMILIES
from services.gpu_engine.models.config import MixtureConfig, ModelConfig
from services.gpu_engine.models.family import TensorSpec, tensors_of
from services.gpu_engine.models.tensors import StoredTensor, TensorType

MULTIPROCESSORS = 132
FREE_BYTES = 1 << 37
MOST_DRAWN = 1 << 18
SIZES = {"fused_layer_bytes": ctypes.sizeof(CFusedLayer), "fused_model_bytes": ctypes.sizeof(CFusedModel)}
_default_rng, _library = np.random.default_rng, ctypes.CDLL
UNSEEN: dict[str, Any] = {"rope_base": 1e4, "rope_scaling": None, "norm_eps": 1e-5, "context": 4096, "eos_ids": (0,)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--builds", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    file: Path = config.getoption("--builds")
    seen: set[Build] = set()

    def note(build: Build) -> None:
        if build not in seen:
            seen.add(build)
            with file.open("a") as lines:
                lines.write(json.dumps(build.as_json()) + "\n")

    patch(note)


def patch(note: Callable[[Build], None]) -> None:
    """Replace the driver's objects by ones that do nothing until something is launched."""

    def build(_self: Any, sources: Sequence[str], defines: Mapping[str, int], libraries: Sequence[Path] = ()) -> bytes:
        note(Build.of(sources, defines, runtime=bool(libraries)))
        return b""

    @contextlib.contextmanager
    def launching(*_: Any, **__: Any) -> Iterator[Any]:
        launch()
        yield

    _put(compiler.Compiler, build=build)
    about = {"name": "none", "arch": "sm_90a", "multiprocessors": MULTIPROCESSORS}

    def device(self: driver.Device, _ordinal: int = 0) -> None:
        self.__dict__.update(about)

    def buffer(self: driver.Buffer, nbytes: int, _purpose: str = "") -> None:
        self.nbytes, self.pointer = nbytes, 0

    def download(_self: driver.Buffer, dtype: Any, shape: Sequence[int], _offset: int = 0) -> Any:
        return np.zeros(shape, dtype)

    _put(driver.Device, __init__=device, free_bytes=lambda _: FREE_BYTES, make_current=nothing, synchronize=nothing)
    _put(driver.Buffer, __init__=buffer, __del__=nothing, fill=nothing, upload=nothing, download=download)
    _put(driver.Stream, __init__=nothing, __del__=nothing, synchronize=nothing, overlaps=nothing, capture=launching)
    _put(driver.Stream, overlapping=lambda _: contextlib.nullcontext())
    _put(driver.Timer, __init__=nothing, __del__=nothing, start=launch, end=launch)
    _put(driver.Module, __init__=nothing, __del__=nothing, constant=constant)
    _put(driver.Module, kernel=lambda self, name, waits=False: driver.Kernel(self, None, name, waits=waits))
    _put(driver.Kernel, launch=launch, allow_shared=nothing, blocks_per_multiprocessor=lambda *_: 1)
    _put(cublas_lt.CublasLt, __init__=lambda self, _: self.__dict__.update(version=""), __del__=nothing)
    _put(cublas_lt.CublasLt, candidates=launch, launch=launch)
    ctypes.CDLL = Library  # type: ignore[assignment, misc]
    _put(families.RandomWeights, __init__=random_weights, __del__=nothing, tensors=zeros)
    np.random.default_rng = Draws  # type: ignore[assignment]
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["transformers"] = Transformers("transformers", note)


def _put(target: type, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        setattr(target, name, method)


def nothing(*_: Any, **__: Any) -> None:
    return None


def launch(*_: Any, **__: Any) -> Any:
    pytest.skip("would launch")


def constant(_module: driver.Module, name: str, dtype: str = "u4") -> Any:
    return np.full((), SIZES.get(name, 0), dtype)[()]


class Library(ctypes.CDLL):
    """The driver's own encodes tensor maps of nothing."""

    def __new__(cls, name: str, *rest: Any, **named: Any) -> Any:
        return NoDriver() if name.startswith("libcuda.so") else _library(name, *rest, **named)


class NoDriver:
    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


def random_weights(self: families.RandomWeights, config: ModelConfig) -> None:
    self.config, self.layers = config, FAMILIES[config.architecture](config)


def zeros(self: families.RandomWeights, _progress: Any = None) -> Iterator[tuple[TensorSpec, StoredTensor]]:
    for spec in tensors_of(self.layers):
        rows, columns = (1, *spec.shape)[-2:]
        yield spec, StoredTensor(spec.shape, TensorType.BF16, np.zeros((rows, 2 * columns), np.uint8))


class Draws:
    """A generator that ends tests which want much of it: their kernels are there by then."""

    def __init__(self, *seed: Any) -> None:
        self._rng = _default_rng(*seed)

    def standard_normal(self, size: Any = None, *kind: Any) -> Any:
        if np.prod(size or 1) > MOST_DRAWN:
            launch()
        return self._rng.standard_normal(size, *kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)


class Transformers(types.ModuleType):
    """Its configurations end a test with the builds of a model of those numbers."""

    def __init__(self, name: str, note: Callable[[Build], None]) -> None:
        super().__init__(name)
        self._note = note

    def __getattr__(self, name: str) -> Callable[..., None]:
        def config(**numbers: Any) -> None:
            for build in builds_of(Geometry(model_of(numbers))):
                self._note(build)
            launch()

        if name.startswith("_"):
            raise AttributeError(name)
        return config


def model_of(numbers: Mapping[str, Any]) -> ModelConfig:
    """What decides on builds, of the arguments of a configuration of transformers."""
    heads, hidden = numbers["num_attention_heads"], numbers["hidden_size"]
    head_dim = numbers.get("head_dim", hidden // heads)
    mixture = None
    if experts := numbers.get("num_experts"):
        chosen, ffn = numbers["num_experts_per_tok"], numbers["moe_intermediate_size"]
        mixture = MixtureConfig(experts, chosen, ffn, normalized=numbers["norm_topk_prob"])
    factor = numbers.get("rope_parameters", {}).get("partial_rotary_factor", 1.0)
    return ModelConfig(
        **UNSEEN,
        architecture="llama",
        layers=numbers["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=numbers["num_key_value_heads"],
        head_dim=head_dim,
        partial_rotary=factor,
        ffn=numbers["intermediate_size"],
        vocabulary=numbers["vocab_size"],
        tied_embeddings=False,
        mixture=mixture,
    )
