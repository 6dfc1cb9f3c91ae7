"""One model on disk, whatever its format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

from services.gpu_engine.models.config import ModelConfig
from services.gpu_engine.models.errors import CorruptCheckpointError, UnsupportedCheckpointError
from services.gpu_engine.models.family import Family, Layer, TensorSpec, tensors_of
from services.gpu_engine.models.fingerprint import fingerprint
from services.gpu_engine.models.llama import llama
from services.gpu_engine.models.phi3 import phi3
from services.gpu_engine.models.qwen3 import qwen3, qwen3_moe
from services.gpu_engine.models.tensors import StoredTensor, TensorType
from services.gpu_engine.models.tokenizer import TokenizerFiles

FAMILIES: dict[str, Family] = {"llama": llama, "phi3": phi3, "qwen3": qwen3, "qwen3_moe": qwen3_moe}

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights load."""


class Checkpoint(ABC):
    """A model's config, tokenizer and weights. Opening reads no weights; tensors are mapped when asked for."""

    def __init__(self, path: Path, config: ModelConfig, tokenizer: TokenizerFiles) -> None:
        self.path = path
        self.config = config
        self.tokenizer = tokenizer

    @abstractmethod
    def stored_name(self, spec: TensorSpec) -> str:
        """The tensor's name in this format."""

    @abstractmethod
    def stored_names(self) -> set[str]:
        """Every tensor of the file that a model could use."""

    @abstractmethod
    def tensor(self, spec: TensorSpec) -> StoredTensor:
        """The tensor's bytes, rotary pairs half a head apart.

        Raises:
            CorruptCheckpointError: missing, or of another shape than the family says.
            UnsupportedCheckpointError: of a type that Blink does not know.
        """

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """What keys and values of attention layer ``layer`` are divided by in a KV cache of FP8."""
        return 1.0, 1.0

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The model as its family's layers."""
        return FAMILIES[self.config.architecture](self.config)

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[TensorSpec, StoredTensor]]:
        """Every tensor of the model, in the order of use; ``progress`` hears of each once it is dealt with."""
        specs = list(tensors_of(self.layers))
        total = self.stored_bytes() if progress else 0
        done = 0
        for spec in specs:
            tensor = self.tensor(spec)
            yield spec, tensor
            done += tensor.nbytes
            if progress:
                progress(done, total)

    def fp8_names(self) -> frozenset[str]:
        """Of the tensors in FP8."""
        specs = tensors_of(self.layers)
        return frozenset(spec.name for spec in specs if self.tensor(spec).type is TensorType.F8_E4M3)

    def stored_bytes(self) -> int:
        """Of all tensors."""
        return sum(self.tensor(spec).nbytes for spec in tensors_of(self.layers))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the model (see ``fingerprint.py`` for what it covers)."""
        return fingerprint(self.config, self.tokenizer, self.tensors())

    def check_tensors(self) -> None:
        """Refuse a file that lacks a tensor, or holds one that the family would leave unused (a bias, an adapter)."""
        needed = {self.stored_name(spec) for spec in tensors_of(self.layers)}
        stored = self.stored_names()
        if missing := sorted(needed - stored):
            raise CorruptCheckpointError(f"{self.path}: {len(missing)} tensors are missing, the first is {missing[0]}")
        if unused := sorted(stored - needed):
            raise UnsupportedCheckpointError(
                f"{self.path}: tensor {unused[0]} has no place in the {self.config.architecture} family"
                f" ({len(unused)} such tensors)"
            )
        for spec in tensors_of(self.layers):
            self.tensor(spec)

    def require_shape(self, spec: TensorSpec, shape: tuple[int, ...], needed: tuple[int, ...] | None = None) -> None:
        """Refuse a stored ``shape`` that is not ``needed``, by default the spec's."""
        if shape != (needed or spec.shape):
            name = self.stored_name(spec)
            raise CorruptCheckpointError(
                f"{self.path}: tensor {name} has shape {shape}, the config asks for {needed or spec.shape}"
            )
