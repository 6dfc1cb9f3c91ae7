"""The GGUF container: metadata and a table of tensors (versions 2 and 3, little-endian).

Read here rather than with the gguf package, whose reader takes two seconds for a 49,152-token vocabulary and cuts
truncated strings short in silence. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.gpu_engine.models.errors import CorruptCheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One line of the tensor table. ``shape`` has the fastest dimension last; ``type`` is GGML's number."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class GgufFile:
    """A mapped GGUF file.

    Attributes:
        metadata: key to value (int, float, bool, str or list).
        tensors: name to table line.

    Raises:
        CorruptCheckpointError: not GGUF, another version, truncated or malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise CorruptCheckpointError(f"{path}: the file is empty") from error
        self._offset = len(MAGIC)
        if (magic := self._map[: self._offset]) != MAGIC:  # also of a file that ends before
            raise CorruptCheckpointError(f"{path}: not a GGUF file, it starts with {magic!r} instead of {MAGIC!r}")
        if (version := self._scalar("<I")) not in VERSIONS:
            raise CorruptCheckpointError(f"{path}: GGUF version is {version}, must be one of {VERSIONS}")
        tensor_count, value_count = self._scalar("<Q"), self._scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(value_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        tensors = [self._tensor() for _ in range(tensor_count)]
        self.tensors = {tensor.name: tensor for tensor in tensors}
        if len(self.tensors) != tensor_count:
            raise CorruptCheckpointError(f"{path}: two tensors share one name")
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CorruptCheckpointError(f"{path}: general.alignment is {alignment!r}, must be a positive integer")
        self._data_start = -(-self._offset // alignment) * alignment

    def bytes_of(self, tensor: GgufTensor, nbytes: int) -> NDArray[np.uint8]:
        """The tensor's data, uint8 [nbytes], mapped."""
        start = self._data_start + tensor.offset
        if start + nbytes > len(self._map):
            raise CorruptCheckpointError(
                f"{self.path}: truncated, tensor {tensor.name} ends at byte {start + nbytes} of {len(self._map)}"
            )
        return np.frombuffer(self._map, np.uint8, nbytes, start)

    def _take(self, count: int) -> bytes:
        start, self._offset = self._offset, self._offset + count
        if self._offset > len(self._map):
            raise CorruptCheckpointError(
                f"{self.path}: truncated, the header goes on at byte {start} of {len(self._map)}"
            )
        return self._map[start : self._offset]

    def _scalar(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        data = self._take(self._scalar("<Q"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise CorruptCheckpointError(f"{self.path}: the string before byte {self._offset} is not UTF-8") from error

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise CorruptCheckpointError(f"{self.path}: metadata before byte {self._offset} has unknown type {kind}")
        item, count = self._scalar("<I"), self._scalar("<Q")
        if item in SCALARS:
            dtype = np.dtype(SCALARS[item])
            return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        if item != STRING:
            raise CorruptCheckpointError(f"{self.path}: the array before byte {self._offset} has items of type {item}")
        return [self._string() for _ in range(count)]

    def _tensor(self) -> GgufTensor:
        name = self._string()
        dimensions = self._scalar("<I")
        shape = tuple(self._scalar("<Q") for _ in range(dimensions))
        return GgufTensor(name, shape[::-1], self._scalar("<I"), self._scalar("<Q"))
